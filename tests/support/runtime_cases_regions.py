"""Regions of images, and convolutions whose windows are moved."""

import numpy as np
import torch
from runtime_cases import added_to
from runtime_cases_newer import numbers

CASES = {}
add = added_to(CASES, terms=64)

# --- regions of images ---
IMAGES, ROWS_OF = numbers(2, 3, 6, 7), np.array([0, 1, 1])
REGIONS = np.array([[0.4, 0.7, 9.1, 7.3], [-3.0, 1.2, 12.9, 14.1], [2.2, 2.1, 2.6, 2.4]], np.float32)


def regions(x, rois, at, size=(2, 3), ratio=2, scale=0.5, half=True):
    """The mean of numbers between the elements of an image, each of the four around it by its distance."""
    results = []
    for region, row in zip(rois, at, strict=True):
        left, top, right, bottom = (float(each) * scale - (0.5 if half else 0) for each in region)
        wide, high = (each if half else max(each, 1.0) for each in (right - left, bottom - top))
        y = torch.zeros((x.shape[1], *size), dtype=torch.float64)
        rows, columns = (ratio or int(np.ceil(length / count)) for length, count in ((high, size[0]), (wide, size[1])))
        for p in range(size[0] * rows):
            for q in range(size[1] * columns):
                at_y, at_x = top + (p + 0.5) / rows * high / size[0], left + (q + 0.5) / columns * wide / size[1]
                is_inside, own = -1 <= at_y <= x.shape[2] and -1 <= at_x <= x.shape[3], (p // rows, q // columns)
                if is_inside:
                    y[:, *own] += sum(shares(x[row], at_y, at_x)) / (rows * columns)
        results.append(y)
    return torch.stack(results)


def shares(x, at_y, at_x):
    """The elements around a place, each times its share."""
    at_y, at_x = min(max(at_y, 0), x.shape[1] - 1), min(max(at_x, 0), x.shape[2] - 1)
    for row, share in ((int(at_y), 1 - at_y % 1), (min(int(at_y) + 1, x.shape[1] - 1), at_y % 1)):
        for column, part in ((int(at_x), 1 - at_x % 1), (min(int(at_x) + 1, x.shape[2] - 1), at_x % 1)):
            yield x[:, row, column] * share * part


given = {"output_height": 2, "output_width": 3, "sampling_ratio": 2, "spatial_scale": 0.5, "domain": "", "wanted": (0,)}
add("RoiAlign", [IMAGES, REGIONS, ROWS_OF], regions, opset=16, **given)
add("RoiAlign", [IMAGES, REGIONS, ROWS_OF], lambda *x: regions(*x, half=False), opset=16, form="output_half_pixel",
    coordinate_transformation_mode="output_half_pixel", **given)  # fmt: skip
add("RoiAlign", [IMAGES, REGIONS, ROWS_OF], lambda *x: regions(*x, ratio=0), opset=16, form="as many samples as fit",
    **{**given, "sampling_ratio": 0})  # fmt: skip


def moved(x, w, offset, bias=None, mask=None, stride=(1, 1), pads=(0, 0), dilation=(1, 1), group=1, parts=1):
    """The sum over the places of a filter, one after the other."""
    rows, channels, per = len(x), x.shape[1] // parts, x.shape[1] // group
    high, wide = offset.shape[2:]
    y = torch.zeros(rows, len(w), high, wide, dtype=torch.float64)
    shifts = offset.reshape(rows, parts, *w.shape[2:], 2, high, wide)
    shares = (
        torch.ones_like(shifts[:, :, :, :, 0]) if mask is None else mask.reshape(rows, parts, *w.shape[2:], high, wide)
    )
    for n, o, c, i, j, p, q in np.ndindex(rows, len(w), per, *w.shape[2:], high, wide):
        channel = o // (len(w) // group) * per + c
        part = channel // channels
        at_y = p * stride[0] - pads[0] + i * dilation[0] + shifts[n, part, i, j, 0, p, q]
        at_x = q * stride[1] - pads[1] + j * dilation[1] + shifts[n, part, i, j, 1, p, q]
        y[n, o, p, q] += w[o, c, i, j] * shares[n, part, i, j, p, q] * beyond(x[n, channel], at_y, at_x)
    return y if bias is None else y + bias[:, None, None]


def beyond(x, at_y, at_x):
    """An image of one channel between its elements, 0 around it."""
    total, (top, left) = 0, (int(np.floor(float(each.detach()))) for each in (at_y, at_x))
    for row in (top, top + 1):
        for column in (left, left + 1):
            if 0 <= row < x.shape[0] and 0 <= column < x.shape[1]:
                total = total + x[row, column] * (1 - (at_y - row).abs()) * (1 - (at_x - column).abs())
    return total


given = {"opset": 19, "domain": ""}
ARRAYS = [numbers(1, 2, 4, 5), numbers(3, 2, 2, 2), numbers(1, 8, 3, 4)]
add("DeformConv", ARRAYS, moved, kernel_shape=[2, 2], **given)
ARRAYS = [numbers(2, 4, 5, 4), numbers(2, 2, 2, 3), 2 * numbers(2, 24, 3, 2), numbers(2), numbers(2, 12, 3, 2)]
given |= {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [1, 2, 1, 0], "dilations": [1, 2]}
given |= {"group": 2, "offset_group": 2, "form": "groups, mask"}
add("DeformConv", ARRAYS, lambda *x: moved(*x, (2, 1), (1, 2), (1, 2), group=2, parts=2), **given)
