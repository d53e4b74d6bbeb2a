"""Cases of layers: softmax, losses, normalizations, windows, resizing, attention, operators of com.microsoft."""

import numpy as np
from gradient_case import add, floats, ints, numbers

SMALL = numbers(2, 3)

# --- softmax and losses ---
for op in ("Softmax", "LogSoftmax"):
    add(op, (7, 11, 13), numbers(2, 3, 4))
    add(op, (11, 13), numbers(2, 3, 4), axis=0, form="axis 0")
    add(op, 13, numbers(2, 3, 4), axis=1, form="axis 1")
LABELS = np.array([0, 2, 1], np.int64)
for reduction in ("mean", "sum", "none"):
    for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        add(op, (12, 13), numbers(3, 4), LABELS, reduction=reduction, form=reduction)
        weights = numbers(4, low=0.5)
        add(op, 13, numbers(3, 4), LABELS, weights, reduction=reduction, form=f"{reduction}, weights", wanted=(0,))
for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
    add(op, 13, numbers(2, 4, 3), np.array([[0, 3, 1], [2, 2, 0]]), ignore_index=2, form="images, ignore_index")

# --- normalizations ---
IMAGE = numbers(2, 4, 3, 2)
SCALE, BIAS = numbers(4, low=0.5), numbers(4, seed=1)
for axis, form in ((-1, ""), (1, "axis 1")):
    shape = IMAGE.shape[axis:]
    add("LayerNormalization", 17, IMAGE, numbers(*shape), numbers(*shape, seed=1), axis=axis, form=form)
add("LayerNormalization", 17, numbers(3, 5), numbers(5), form="without bias")
add("LayerNormalization", 17, numbers(2, 3, 4), numbers(4), numbers(1), axis=1, form="broadcast scale")
add("LayerNormalization", 17, numbers(2, 3, 4), numbers(2, 1, 4), numbers(2, 3, 1), form="scale of each row")
add("RMSNormalization", 23, numbers(2, 3, 4), numbers(4))
add("RMSNormalization", 23, numbers(2, 3, 4), numbers(2, 3, 4), form="scale of each row")
add("RMSNormalization", 23, numbers(2, 3, 4), numbers(3, 4), axis=1, form="axis 1")
add("InstanceNormalization", (7, 22), IMAGE, SCALE, BIAS)
add("InstanceNormalization", 22, IMAGE, SCALE, BIAS, epsilon=0.01, form="epsilon")
add("GroupNormalization", 18, IMAGE, SCALE[:2], BIAS[:2], num_groups=2, form="of groups")
add("GroupNormalization", 21, IMAGE, SCALE, BIAS, num_groups=2)
add("GroupNormalization", 21, IMAGE, SCALE, BIAS, num_groups=2, epsilon=0.01, form="epsilon")
for p in (1, 2):
    add("LpNormalization", (7, 22), numbers(3, 4), p=p, axis=0 if p == 1 else -1, form=f"p {p}")
add("LRN", (7, 13), IMAGE, size=3, alpha=0.3, beta=0.6)
add("LRN", 13, IMAGE, size=2, alpha=0.3, bias=0.7, form="even size")
add("MeanVarianceNormalization", (9, 13, 18), numbers(3, 3, 2, 2))
STATISTICS = numbers(4, seed=2), numbers(4, low=0.5, seed=3)
add("BatchNormalization", (7, 9, 14, 15), IMAGE, SCALE, BIAS, *STATISTICS, wanted=(0, 1, 2), form="given statistics")
add("BatchNormalization", 15, IMAGE, SCALE, BIAS, *STATISTICS, wanted=(0, 1, 2), epsilon=0.01, form="epsilon")
trains = {"wanted": (0, 1, 2), "form": "trains"}
add("BatchNormalization", (14, 15), IMAGE, SCALE, BIAS, *STATISTICS, training_mode=1, outputs=3, **trains)
trains["form"] = "trains, by its outputs"
add("BatchNormalization", 9, IMAGE, SCALE, BIAS, *STATISTICS, outputs=5, **trains)
add("Dropout", (7, 10, 12, 13), SMALL, form="does not train")

# --- windows ---
for opset in (7, 11, 22):
    add("Conv", opset, numbers(2, 4, 5, 4), numbers(3, 4, 3, 2, seed=1), BIAS[:3], pads=[1, 0, 1, 1])
add("Conv", 11, numbers(1, 2, 7), numbers(2, 2, 3, seed=1), strides=[2], dilations=[2], form="strides, dilations")
PLANES = numbers(1, 2, 5, 6), numbers(2, 2, 3, 2, seed=1)
add("Conv", 11, *PLANES, auto_pad="SAME_UPPER", strides=[2, 2], form="SAME_UPPER")
add("Conv", 11, *PLANES, auto_pad="SAME_LOWER", form="SAME_LOWER")
add("Conv", 11, numbers(1, 1, 3, 4, 3), numbers(2, 1, 2, 2, 2, seed=1), form="three axes")
LAYER = numbers(1, 3, 3, 4), numbers(3, 2, 3, 2, seed=1), BIAS[:2]
add("ConvTranspose", (7, 11, 22), *LAYER, strides=[2, 1], pads=[1, 0, 0, 1])
LAYER = numbers(1, 2, 4), numbers(2, 1, 3, seed=1)
add("ConvTranspose", 11, *LAYER, strides=[2], output_padding=[1], form="output_padding")
LAYER = numbers(1, 2, 3, 3), numbers(2, 2, 3, 3, seed=1)
add("ConvTranspose", 11, *LAYER, strides=[2, 2], auto_pad="SAME_UPPER", form="SAME_UPPER")
add("ConvTranspose", 11, *LAYER, strides=[3, 2], output_shape=[10, 8], form="output_shape")
add("ConvTranspose", 11, numbers(1, 2, 4), numbers(2, 2, 2, seed=1), dilations=[2], form="dilations")
for opset in (7, 8, 11, 12, 22):
    add("MaxPool", opset, numbers(1, 2, 4, 5), kernel_shape=[2, 2], strides=[2, 2])
add(
    "MaxPool", 12, numbers(1, 2, 5, 5), kernel_shape=[2, 2], pads=[1, 1, 0, 0], dilations=[2, 2], form="pads, dilations"
)
for opset in (7, 11, 19, 22):
    add("AveragePool", opset, numbers(1, 2, 4, 5), kernel_shape=[2, 3], strides=[2, 1])
padded = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
add("AveragePool", 11, numbers(1, 2, 4, 5), form="pads", **padded)
add("AveragePool", 11, numbers(1, 2, 4, 5), count_include_pad=1, form="pads that count", **padded)
add("AveragePool", 19, numbers(1, 1, 6, 6), kernel_shape=[2, 2], dilations=[2, 2], form="dilations")
add("AveragePool", 19, numbers(1, 1, 5, 5), kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1, form="ceil_mode")
add("Conv", 11, numbers(1, 4, 4, 3), numbers(4, 1, 2, 2, seed=1), group=4, form="groups")
add("ConvTranspose", 11, numbers(1, 4, 3, 3), numbers(4, 1, 2, 2, seed=1), group=4, form="groups")
TALL = {"kernel_shape": [2, 3], "strides": [2, 2]}
add("AveragePool", 11, numbers(1, 2, 5, 6), auto_pad="SAME_LOWER", form="SAME_LOWER", **TALL)
TWOS = {"kernel_shape": [2, 2], "strides": [2, 2]}
add("MaxPool", 12, numbers(1, 2, 4, 5), storage_order=1, outputs=2, form="storage_order 1", **TWOS)

# --- recurrent layers ---
SEQUENCE, LENGTHS = numbers(3, 2, 2), np.array([3, 2], np.int32)
for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
    weights = {count: (numbers(count, 2 * gates, 2), numbers(count, 2 * gates, 2, seed=1)) for count in (1, 2)}
    biases = numbers(2, 4 * gates, seed=2)
    states = [numbers(2, 2, 2, seed=seed) for seed in range(3, 5 if op == "LSTM" else 4)]
    places = tuple(range(5, 5 + len(states)))
    add(op, (7, 14, 22), SEQUENCE, *weights[1], hidden_size=2)
    back, both = {"hidden_size": 2, "direction": "reverse"}, {"hidden_size": 2, "direction": "bidirectional"}
    add(op, 14, SEQUENCE, *weights[1], biases[:1], LENGTHS, form="reverse, lengths", **back)
    everything = SEQUENCE, *weights[2], biases, LENGTHS, *states
    wanted = (0, 1, 2, 3, *places)
    add(op, (7, 22), *everything, form="both directions, lengths, initial states", **both)
    empty = SEQUENCE, *weights[2], biases, np.array([0, 3], np.int32), *states
    add(op, 14, *empty, outputs=1 + len(states), form="a length of 0", **both)
    turned = [each.swapaxes(0, 1) for each in states]
    batch_first = SEQUENCE.swapaxes(0, 1), *weights[2], None, None, *turned
    add(op, 14, *batch_first, wanted=(0, 1, *places), form="layout 1", layout=1, **both)
names = {"activations": ["Relu", "Sigmoid"], "direction": "bidirectional", "hidden_size": 2}
add("RNN", 14, SEQUENCE, numbers(2, 2, 2), numbers(2, 2, 2, seed=1), form="activations", **names)
EVERY = ("Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu", "Softsign", "Softplus")
TAKES_BETA = ("Affine", "ScaledTanh", "HardSigmoid")
for op, gates, count in (("RNN", 1, 1), ("GRU", 3, 2), ("LSTM", 4, 3)):
    weights = numbers(2, 2 * gates, 2), numbers(2, 2 * gates, 2, seed=1), numbers(2, 4 * gates, seed=2)
    layer = SEQUENCE, *(0.4 * each for each in weights)  # states of some activations have no bounds
    named = {"hidden_size": 2, "direction": "bidirectional"}
    for first, name in enumerate(EVERY):
        taken = [EVERY[(first + place) % len(EVERY)] for place in range(2 * count)]
        alphas = [0.3 + 0.1 * place for place, each in enumerate(taken) if not each.startswith("Soft")]
        betas = [0.7 - 0.1 * place for place, each in enumerate(taken) if each in TAKES_BETA]
        given = {f"activation_{name}": values for name, values in (("alpha", alphas), ("beta", betas)) if values}
        add(op, 14, *layer, form=f"activations from {name} on", activations=taken, **given, **named)
    names = ["HardSigmoid", "Elu", "LeakyRelu"][:count] * 2
    add(op, 14, *layer, LENGTHS, form="clip, lengths, their own numbers", activations=names, clip=0.3, **named)
    add(op, 22, *layer, form="clip", clip=0.2, **named)
    reset = {"linear_before_reset": 1} if op == "GRU" else {"input_forget": 1} if op == "LSTM" else {}
    add(op, 14, *layer, form="clip and others", clip=0.4, **reset, **named)
LAYER = SEQUENCE, numbers(1, 6, 2), numbers(1, 6, 2, seed=1), numbers(1, 12)
add("GRU", 14, *LAYER, linear_before_reset=1, hidden_size=2, form="linear_before_reset")
LAYER = SEQUENCE, numbers(1, 8, 2), numbers(1, 8, 2, seed=1), None, None, None, None, numbers(1, 6)
add("LSTM", 14, *LAYER, hidden_size=2, form="peepholes")
peepholes = {"direction": "reverse", "hidden_size": 2}
add("LSTM", 14, *LAYER[:4], LENGTHS, *LAYER[5:], form="peepholes, reverse, lengths", **peepholes)
names = {"activations": ["HardSigmoid", "softsign", "Tanh"], "hidden_size": 2}
add("LSTM", 14, *LAYER, clip=0.5, form="peepholes, clip", **names)
add("LSTM", 14, *LAYER, clip=0.5, input_forget=1, form="peepholes, clip, input_forget", **names)

# --- resizing ---
PICTURE = numbers(1, 2, 3, 4)
add("Upsample", 7, PICTURE, scales=[1.0, 1.0, 2.0, 3.0], mode="nearest", form="scales as attribute")
add("Upsample", 9, PICTURE, floats(1, 1, 2, 3), mode="nearest")
add("Upsample", 7, PICTURE, scales=[1.0, 1.0, 2.0, 1.5], mode="linear", form="linear, scales as attribute")
add("Upsample", 9, PICTURE, floats(1, 1, 1.5, 3), mode="nearest", form="broken scales")
add("Resize", 10, PICTURE, floats(1, 1, 2, 2), mode="nearest")
add("Resize", 10, PICTURE, floats(1, 1, 2.5, 1.5), mode="linear", form="linear")
add("Resize", 10, PICTURE, floats(1, 1, 1, 0.6), mode="nearest", form="smaller")
for opset in (11, 13, 18, 19):
    add("Resize", opset, PICTURE, floats(), floats(1, 1, 2, 2), mode="nearest", form="nearest")
    add("Resize", opset, PICTURE, floats(), floats(1, 1, 2.5, 0.7), mode="linear", form="linear")
for transformation in ("align_corners", "asymmetric", "pytorch_half_pixel"):
    given = {"coordinate_transformation_mode": transformation}
    add("Resize", 13, PICTURE, None, None, ints(1, 2, 5, 7), mode="linear", form=f"linear, {transformation}", **given)
add("Resize", 13, PICTURE, None, None, ints(1, 2, 5, 3), mode="nearest", nearest_mode="ceil", form="nearest, sizes")
add("Resize", 13, PICTURE, None, floats(1, 1, 1.6, 2), mode="cubic", cubic_coeff_a=-0.5, form="cubic")
add("Resize", 13, PICTURE, None, floats(1, 1, 0.7, 2), mode="cubic", exclude_outside=1, form="cubic, exclude_outside")
add("Resize", 18, PICTURE, None, floats(0.6, 0.6), axes=[2, 3], mode="linear", antialias=1, form="axes, antialias")
add("Resize", 13, numbers(1, 2, 3, 2, 2), None, floats(1, 1, 1.5, 2, 2.5), mode="linear", form="three axes")
for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
    given = {"nearest_mode": nearest, "coordinate_transformation_mode": "asymmetric"}
    add("Resize", 13, PICTURE, None, floats(1, 1, 2.5, 0.6), mode="nearest", form=nearest, **given)
crop = {"coordinate_transformation_mode": "tf_crop_and_resize", "form": "linear, tf_crop_and_resize"}
REGION = floats(0, 0, 0.2, 0.1, 1, 1, 0.9, 1.3)
add("Resize", (11, 13), PICTURE, REGION, floats(), ints(1, 2, 4, 5), mode="linear", **crop)
even = {"coordinate_transformation_mode": "half_pixel_symmetric"}
add("Resize", 19, PICTURE, None, floats(1, 1, 2.3, 1.6), mode="linear", form="half_pixel_symmetric", **even)
for policy in ("not_larger", "not_smaller"):
    given = {"keep_aspect_ratio_policy": policy, "axes": [2, 3]}
    add("Resize", 18, PICTURE, None, None, ints(5, 9), mode="linear", form=f"linear, {policy}", **given)
GRID = numbers(1, 3, 2, 2, low=-1.3, high=1.3)
for padding, corners in (("zeros", 0), ("zeros", 1), ("border", 0), ("reflection", 0), ("reflection", 1)):
    given = {"padding_mode": padding, "align_corners": corners}
    form = f"{padding}, corners {corners}"
    add("GridSample", 20, PICTURE, GRID, mode="linear", form=f"linear, {form}", **given)
for padding in ("border", "reflection"):
    add("GridSample", 20, PICTURE, GRID, mode="cubic", padding_mode=padding, form=f"cubic, {padding}")
add("GridSample", 16, PICTURE, GRID, mode="bilinear", form="bilinear")
add("GridSample", 16, PICTURE, GRID, mode="bicubic", form="bicubic")
add("GridSample", 20, PICTURE, GRID, mode="nearest", form="nearest")
for corners in (0, 1):
    for form, theta, size in (("", numbers(2, 2, 3), (2, 1, 3, 4)), ("volume, ", numbers(1, 3, 4), (1, 2, 3, 4, 2))):
        add("AffineGrid", 20, theta, ints(*size), align_corners=corners, form=f"{form}corners {corners}")
VOLUME = numbers(1, 2, 3, 2, 3), numbers(1, 2, 1, 2, 3, low=-0.9, high=0.9)
add("GridSample", 20, *VOLUME, mode="linear", form="three axes")
