"""More nodes to lower, each with a float64 formula of its own: convolution, pooling, resizing."""

import numpy as np
from lowering_cases import SINGLE, Case, normal

from opgrad.ops.pooling import resized_axes

# --- convolution and pooling -----------------------------------------------------------------------------------------


def windows(x_shape, y_shape, kernel, strides, dilations, pads):
    """For each offset in the kernel: which spatial places of Y have it in X, and where there."""
    for offset in np.ndindex(*kernel):
        y_places, x_places = [], []
        for axis, place in enumerate(offset):
            y = np.arange(y_shape[2 + axis])
            x = y * strides[axis] + place * dilations[axis] - pads[axis]
            inside = (x >= 0) & (x < x_shape[2 + axis])
            y_places.append(y[inside])
            x_places.append(x[inside])
        yield offset, np.ix_(*y_places), np.ix_(*x_places)


def conv_grad(dy, x, w, kernel, strides, dilations, pads, group):
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    per_group, outputs = w.shape[1], w.shape[0] // group
    for offset, y_place, x_place in windows(x.shape, dy.shape, kernel, strides, dilations, pads):
        for o in range(w.shape[0]):
            for i in range(per_group):
                channel = o // outputs * per_group + i
                for n in range(x.shape[0]):
                    dx[n, channel][x_place] += w[o, i][offset] * dy[n, o][y_place]
                    dw[o, i][offset] += (x[n, channel][x_place] * dy[n, o][y_place]).sum()
    return dx, dw, dy.sum((0, *range(2, x.ndim)))


def conv_case(sizes, kernel, group=1, strides=None, dilations=None, pads=None, auto_pad=None, skip=()):
    axes, channels, outputs = len(sizes), 2 * group, 3 * group
    given = {"strides": strides, "dilations": dilations, "pads": pads, "auto_pad": auto_pad, "group": group}
    strides, dilations = strides or [1] * axes, dilations or [1] * axes
    widths = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        y = [-(-n // s) for n, s in zip(sizes, strides, strict=True)]
        total = [max((m - 1) * s + w - n, 0) for m, s, w, n in zip(y, strides, widths, sizes, strict=True)]
        begin = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in total]
    else:
        begin, end = (pads or [0] * 2 * axes)[:axes], (pads or [0] * 2 * axes)[axes:]
        y = [(n + b + e - w) // s + 1 for n, b, e, w, s in zip(sizes, begin, end, widths, strides, strict=True)]
    attributes = {"kernel_shape": kernel} | {name: value for name, value in given.items() if value is not None}
    shapes = (2, outputs, *y), (2, channels, *sizes), (outputs, channels // group, *kernel)

    def formula(dy, x, w):
        results = conv_grad(dy, x, w, kernel, strides, dilations, begin, group)
        return tuple(None if index in skip else each for index, each in enumerate(results))

    return Case("ConvGrad", normal(*shapes), formula, attributes, f"{sizes}{skip or ''}", dtypes=SINGLE)


CONVOLUTION = [
    conv_case((5,), [3]),
    conv_case((7,), [3], strides=[2], pads=[1, 0], group=2),
    conv_case((5, 6), [3, 2]),
    conv_case((5, 6), [3, 2], pads=[1, 0, 1, 1], skip=(0,)),
    conv_case((5, 6), [3, 2], pads=[1, 0, 1, 1], skip=(2,)),
    conv_case((8, 7), [3, 2], strides=[2, 3], pads=[1, 0, 0, 1], dilations=[2, 1]),
    conv_case((6, 6), [2, 2], strides=[3, 3], group=2),
    conv_case((8, 7), [3, 3], dilations=[2, 3], pads=[2, 3, 2, 3], group=3),
    conv_case((4, 3, 5), [2, 2, 3], strides=[1, 2, 2], pads=[0, 1, 1, 1, 0, 1]),
    conv_case((5, 6), [2, 4], auto_pad="SAME_UPPER"),
    conv_case((5, 6), [2, 4], auto_pad="SAME_LOWER"),
    conv_case((5, 6), [3, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
    conv_case((6, 5), [3, 4], strides=[2, 3], auto_pad="SAME_LOWER"),
    conv_case((5, 6), [2, 3], strides=[2, 1], auto_pad="VALID"),
]


def conv_transpose_grad(dy, x, w, kernel, strides, dilations, pads, group):
    """A transposed convolution is the gradient of a convolution from Y to X."""
    dw = conv_grad(x, dy, w, kernel, strides, dilations, pads, group)[1]
    dx = np.zeros(x.shape)
    inputs, per_group = w.shape[0] // group, w.shape[1]
    for offset, x_place, y_place in windows(dy.shape, x.shape, kernel, strides, dilations, pads):
        for i, o in np.ndindex(*w.shape[:2]):
            channel = i // inputs * per_group + o
            for n in range(x.shape[0]):
                dx[n, i][x_place] += w[i, o][offset] * dy[n, channel][y_place]
    return dx, dw, dy.sum((0, *range(2, x.ndim)))


def conv_transpose_case(x, y, kernel, strides, dilations, pads, group=1, **more):
    """pads: where the formula finds what the attributes `more` say, if there are any."""
    shapes = (2, 3 * group, *y), (2, 2 * group, *x), (2 * group, 3, *kernel)

    def formula(*given):
        return conv_transpose_grad(*given, kernel, strides, dilations, pads, group)

    attributes = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": group}
    attributes |= more if "auto_pad" in more or "output_shape" in more else {"pads": pads, **more}
    return Case("ConvTransposeGrad", normal(*shapes), formula, attributes, dtypes=SINGLE)


TRANSPOSED = [
    conv_transpose_case((5,), (7,), [3], [1], [1], [0, 0]),
    conv_transpose_case((4, 3), (9, 5), [3, 2], [2, 2], [1, 1], [0, 1, 0, 0], group=2),
    conv_transpose_case((4, 3), (8, 6), [3, 2], [2, 2], [1, 1], [1, 1, 1, 0]),  # output_padding of 1
    conv_transpose_case((3, 4), (7, 8), [3, 3], [1, 1], [2, 2], [0, 0, 0, 0]),
    conv_transpose_case((3,), (9,), [2], [1], [4], [0, 0], output_padding=[2]),  # not less than the stride
    conv_transpose_case((4, 3), (8, 6), [3, 4], [2, 2], [1, 1], [0, 1, 1, 1], auto_pad="SAME_UPPER"),
    conv_transpose_case((4, 3), (8, 6), [3, 4], [2, 2], [1, 1], [1, 1, 0, 1], auto_pad="SAME_LOWER"),
    conv_transpose_case((4, 3), (6, 9), [3, 2], [2, 2], [1, 1], [2, 0, 1, 0], output_shape=[6, 9]),
]


def average_pool_case(sizes, y, kernel, strides, pads, include, **more):
    begin, end = pads[: len(sizes)], pads[len(sizes) :]

    def formula(dy):
        """Windows over X within its padding; the gradient of the padding is dropped."""
        padded = [n + b + e for n, b, e in zip(sizes, begin, end, strict=True)]
        dx, inside = np.zeros((2, 3, *padded)), np.zeros(padded)
        core = tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))
        inside[core] = 1
        for place in np.ndindex(*y):
            window = tuple(slice(i * s, i * s + k) for i, s, k in zip(place, strides, kernel, strict=True))
            count = inside[window].size if include else inside[window].sum()
            dx[:, :, *window] += (dy[:, :, *place] / count).reshape(2, 3, *[1] * len(y))
        return dx[:, :, *core]

    attributes = {"kernel_shape": kernel, "strides": strides, "pads": pads, "count_include_pad": int(include), **more}
    return Case("AveragePoolGrad", normal((2, 3, *y)), formula, attributes, f"{sizes}", "", SINGLE, sizes=True)


POOLING = [
    average_pool_case((5,), (3,), [3], [2], [1, 1], False),
    average_pool_case((5,), (3,), [3], [2], [1, 1], True),
    average_pool_case((7, 4), (3, 3), [3, 2], [2, 1], [0, 0, 0, 0], False),
    average_pool_case((6, 4), (3, 3), [3, 2], [2, 1], [0, 0, 0, 0], False, ceil_mode=1),
    average_pool_case((6, 4), (3, 3), [3, 2], [2, 1], [0, 0, 0, 0], True, ceil_mode=1),
    average_pool_case((5, 4), (3, 2), [2, 2], [2, 2], [1, 0, 1, 0], True, ceil_mode=1),
    average_pool_case((4, 3, 5), (2, 2, 3), [2, 2, 3], [2, 2, 2], [0, 1, 1, 0, 0, 1], True),
    average_pool_case((4, 3, 5), (2, 2, 3), [2, 2, 3], [2, 2, 2], [0, 1, 1, 0, 0, 1], False),
]


def resize_case(x, y, note, scales=(), roi=(), axes=None, **attributes):
    """Resizing of two axes; the formula is that of its weights, which onnxruntime's own forward has proved."""
    rank = len(x)
    form = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_floor"}
    form |= {"cubic_coeff_a": -0.75, "exclude_outside": 0, "antialias": 0, "keep_aspect_ratio_policy": "stretch"}
    form |= attributes | {"axes": tuple(axes or range(rank)), "scales": scales, "roi": roi}

    def formula(dy, *_):
        dx = dy
        for axis, resized in resized_axes("", x, y, form).items():
            dx = np.moveaxis(np.tensordot(resized.matrix(), dx, (0, axis)), 0, axis)
        return dx

    def inputs(rng):
        more = [np.array(each, np.float32) if each else None for each in (roi, scales)]
        return [rng.standard_normal(y), np.zeros(x), *more]

    attributes |= {"axes": axes} if axes else {}
    return Case("ResizeGrad", inputs, formula, attributes, note, dtypes=SINGLE)


REGION = (0.0, 0.0, 0.2, -0.1, 1.0, 1.0, 0.9, 1.3)
RESIZING = [
    resize_case((2, 3, 4, 5), (2, 3, 8, 10), "scales", (1.0, 1.0, 2.0, 2.0), mode="linear"),
    resize_case((2, 3, 4, 5), (2, 3, 7, 3), "sizes", mode="linear", coordinate_transformation_mode="align_corners"),
    resize_case((2, 3, 4, 5), (2, 3, 9, 10), "axes", (2.3, 2.0), axes=[2, 3], nearest_mode="ceil"),
    resize_case(
        (1, 2, 4, 4),
        (1, 2, 3, 5),
        "region",
        roi=REGION,
        mode="cubic",
        coordinate_transformation_mode="tf_crop_and_resize",
    ),
]
