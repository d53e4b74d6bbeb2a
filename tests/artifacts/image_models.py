"""Models that make images of images, which onnxruntime-training could make artifacts of and not train on the CPU."""

import numpy as np
import torch
from onnxruntime.training import artifacts
from torch import nn
from torch.nn import functional

ROWS = 4


def picture(random):
    """Images with a bright square, in steps of an eighth, and for each pixel whether it is in the square."""
    pixels, inside = random.integers(-8, 9, (ROWS, 1, 8, 8)) / 8, np.zeros((ROWS, 8, 8), np.int64)
    for row, (top, left) in enumerate(random.integers(0, 5, (ROWS, 2))):
        inside[row, top : top + 4, left : left + 4] = 1
    return (pixels + inside[:, None]).astype(np.float32), inside


class UNet(nn.Module):
    """A U-Net of two levels, whose deeper one is resized twice: by linear interpolation and to the nearest pixel."""

    outputs, loss, by_torch = ("scores",), artifacts.LossType.BCEWithLogitsLoss, True

    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.deepest, self.join = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(12, 6, 3, padding=1)
        self.last = nn.Conv2d(10, 1, 1)

    def forward(self, pixels):
        wide = torch.relu(self.wide(pixels))
        deep = torch.relu(self.deep(functional.avg_pool2d(wide, 2)))
        deepest = torch.relu(self.deepest(functional.avg_pool2d(deep, 2)))
        deep = torch.relu(self.join(torch.cat([deep, functional.interpolate(deepest, scale_factor=2.0)], 1)))
        large = functional.interpolate(deep, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.last(torch.cat([wide, large], 1))

    def batch(self, random):
        pixels, inside = picture(random)
        return {"pixels": pixels, "target": inside[:, None].astype(np.float32)}

    def torch_loss(self, pixels, target):
        return functional.binary_cross_entropy_with_logits(self(pixels), target)


class Transposed(nn.Module):
    """An autoencoder whose decoder is a transposed convolution with output padding, and one of groups."""

    outputs, loss, by_torch = ("output",), artifacts.LossType.MSELoss, True

    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.widen = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1)
        self.mix = nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2, padding=1)

    def forward(self, pixels):
        return self.mix(torch.tanh(self.widen(torch.relu(self.encode(pixels))))).sum(1, keepdim=True)

    def batch(self, random):
        pixels, _ = picture(random)
        return {"pixels": pixels, "target": pixels}

    def torch_loss(self, pixels, target):
        return functional.mse_loss(self(pixels), target)


SETS = {"resizing_unet": UNet, "transposed_convolution": Transposed}
