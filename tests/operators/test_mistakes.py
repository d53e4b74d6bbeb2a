"""Calls of the operators of training graphs that are wrong, with what their messages say."""

import math

import numpy as np
import pytest
from graph_cases import arrays_of

import opgrad

INF = math.inf


def z(*shape, dtype="f4"):
    return np.zeros(shape, dtype)


def n(*numbers, dtype=int):
    return np.array(numbers, dtype)


X, TABLE, IMAGE, Q, K = z(2, 3, 4, 6), z(4, 3), z(2, 3, 4), z(2, 4, 5, 8), z(2, 2, 7, 8)
ONES, NONE, D, C = np.ones((2, 3), "f4"), z(2, 3, dtype=int), np.float64, np.ones(3, "f4")
LOGITS, LABELS, WEIGHT = z(3, 4), n(0, 3, 1), n(1, 2, 0.5, dtype="f4")
LISTS = [ONES, np.ones(4, "f4")]
LAYER = {"x": z(3, 2, 4, dtype=D), "w": z(1, 20, 4, dtype=D), "r": z(1, 20, 5, dtype=D)}
PACKED = {"q": Q[0], "k": Q[0], "v": Q[0], "cu_seqlens_q": n(0, 4)}
HEAD = {"x": z(10, 64), "b": z(33, 64), "labels": z(10, dtype=int), "N": 33, "K": 64}
CROP = {"coordinate_transformation_mode": "tf_crop_and_resize"}
CELL = {"dy": z(2, 2, 3, 3, dtype=D), "shape": (2, 2, 6, 6)}
SLICE = {"dy": ONES, "shape": (4, 3), "starts": (0,), "ends": (2,)}
TUPLES = {"shape": (4, 3), "indices": NONE[:, :1], "dy": ONES[:, 0]}
ALONG = {"dy": ONES, "shape": (2, 3), "indices": NONE}
GELU = {
    "x has dtype float64, expected float32, the dtype of dy": {"x": LOGITS.astype(D)},
    "dy has dtype int64, expected one of float32, float64, float16, bf": {"dy": LOGITS.astype(int)},
}
# By operator: the arguments of a call that is right, and what is changed in it, by what the message begins with.
VALUES = {
    "rotary_embedding": ({"x": X, "cos_cache": TABLE, "sin_cache": TABLE, "out": np.ones_like(X)}, {
        "x has 2 dimensions, expected 3 or 4": {"x": X[0, 0]},
        "cos_cache has shape (3, 3), expected (4, 3)": {"cos_cache": TABLE[:3], "sin_cache": TABLE[:3]},
        "sin_cache has shape (4, 2), expected (4, 3), the shape of cos_cache": {"sin_cache": TABLE[:, :2]},
        "position_ids[0, 0] is 4, expected -4 to 3": {"position_ids": np.full((2, 4), 4)},
        "position_ids has shape (4, 2), expected (2, 4)": {"position_ids": z(4, 2, dtype=int)},
        "rotary_embedding_dim is 3, expected an even number from 0 to 6": {"rotary_embedding_dim": 3},
        "rotary_embedding_dim is 8, expected an even number from 0 to 6": {"rotary_embedding_dim": 8},
        "rotary_embedding_dim is 0, expected an even number above 0": {"x": X[..., :5]},
        "num_heads is 2, expected 0 or 3, the heads that x has": {"num_heads": 2},
        "num_heads is 0, expected a number that divides 6": {"x": X[0]},
        "layout is 'LBHD', expected one of BHLD, BLHD": {"layout": "LBHD"},
    }),
    "bias_softmax": ({"x": IMAGE, "bias": IMAGE}, {
        "bias has shape (3,), expected (4,), the shape of x from axis on, behind dimensions": {"bias": IMAGE[0, 0, :3]},
        "bias has shape (4, 4), expected (4,), the shape of x from axis on": {"bias": z(4, 4)},
        "bias has shape (3, 4), expected (2, 3, 4), the shape of x from axis on": {"bias": IMAGE[0], "axis": 0},
        "bias has shape (0, 3, 4), expected (4,), the shape of x from axis on": {"bias": IMAGE[:0]},
        "bias has shape (), expected (4,), the shape of x from axis on": {"bias": IMAGE[0, 0, 0]},
        "axis is 3, expected -3 to 2 for an array of 3": {"axis": 3},
    }),
    "softmax_dropout_grad": ({"dy": ONES, "mask": ONES > 0, "y": ONES}, {
        "ratio is 1.5, expected 0 to 1": {"ratio": 1.5},
        "mask has shape (2,), expected (2, 3), the": {"mask": ONES[:, 0] > 0},
    }),
    "dropout": ({"x": ONES, "seed": 1}, {
        "ratio is -0.5, expected 0 to 1": {"ratio": -0.5}, "ratio is 1.5, expected 0 to 1": {"ratio": 1.5},
        "ratio is nan, expected 0 to 1": {"ratio": math.nan},
        "seed has shape (2,), expected (), one number": {"seed": [1, 2]},
    }),
    "dropout_grad": ({"dy": ONES, "mask": ONES > 0}, {
        "ratio is -0.5, expected 0 to 1": {"ratio": -0.5}, "ratio is nan, expected 0 to 1": {"ratio": math.nan},
        "mask has shape (1, 3), expected (2, 3), the": {"mask": ONES[:1] > 0},
    }),
    "fake_quant_grad": ({"dy": ONES, "mask": ONES > 0}, {
        "mask has shape (1, 3), expected (2, 3), the": {"mask": ONES[:1] > 0},
    }),
    "quantized_matmul_grad": (
        {"dy": z(2, 4), "b": z(4, 16, dtype="u1"), "scales": z(4, 1), "N": 4, "K": 32, "column_block": 32,
         "out": np.ones((2, 32), "f4")}, {
        "bits is 3, expected 2, 4 or 8": {"bits": 3},
        "dy has shape (2, 4), expected (2, 5)": {"N": 5},
        "b has shape (4, 16), expected (4, 40)": {"K": 80, "column_block": 0, "out": np.ones((2, 80), "f4")},
        "scales has shape (4, 1), expected (4, 2)": {"column_block": 16},
        "column_block is 3, expected blocks of whole bytes, as bits is 4": {"column_block": 3},
        "g_idx[1] is 1, expected -1 to 0": {"g_idx": n(0, 1, *[0] * 30, dtype="i4")},
        "zero_points has 4 elements of float32, expected 8, one for each block": {
            "column_block": 16, "scales": z(4, 2), "zero_points": z(4, 1)},
        "zero_points is packed, expected floats, as column_block is 1": {
            "column_block": 1, "scales": z(4, 32), "zero_points": z(4, 16, dtype="u1")},
    }),
    "resize_grad": ({"dy": z(1, 2, 8, 10, dtype=D), "x": z(1, 2, 4, 5, dtype=D)}, {
        "dy has 4 dimensions, expected 3, as x has": {"x": z(1, 2, 3, dtype=D)},
        "scales has 2 numbers, expected 4": {"scales": (2.0, 2.0)},
        "scales is (1.0, 1.0, 0.0, 2.0), expected finite ones above 0": {"scales": (1.0, 1.0, 0.0, 2.0)},
        "dy has 10 elements along axis 3, expected 5 * 3 elements": {"scales": (1.0, 1.0, 2.0, 3.0)},
        "axes is (2, 2), expected different ones from -4 to 3": {"axes": (2, 2)},
        "dy has 10 elements along axis 3, expected 5 elements, as axes leaves it out": {"axes": (2,)},
        "mode is 'area', expected one of nearest, linear, cubic": {"mode": "area"},
        "nearest_mode is 'up', expected one of round_prefer_floor": {"nearest_mode": "up"},
        "coordinate_transformation_mode is 'x', expected one of half_pixel": {"coordinate_transformation_mode": "x"},
        "roi is empty, expected the region that tf_crop_and_resize takes": CROP,
        "antialias is True, expected mode linear or cubic with it, not nearest": {"antialias": True},
        "keep_aspect_ratio_policy is not_larger, expected scales with it": {"keep_aspect_ratio_policy": "not_larger"},
        "cubic_coeff_a is nan, expected a finite number": {"cubic_coeff_a": math.nan},
    }),
    "lstm_training": (LAYER, {
        "x has 2 dimensions, expected 3": {"x": z(3, 4, dtype=D)},
        "w has shape (1, 20, 3), expected (1, 20, 4)": {"w": z(1, 20, 3, dtype=D)},
        "w has shape (1, 15, 4), expected (1, 20, 4)": {"w": z(1, 15, 4, dtype=D)},
        "r has shape (1, 21, 5), expected (1, 20, 5)": {"r": z(1, 21, 5, dtype=D)},
        "w has shape (1, 20, 4), expected (2, 20, 4)": {"direction": "bidirectional"},
        "bias has shape (1, 20), expected (1, 40)": {"bias": z(1, 20, dtype=D)},
        "initial_h has shape (1, 3, 5), expected (1, 2, 5)": {"initial_h": z(1, 3, 5, dtype=D)},
        "peepholes has shape (1, 20), expected (1, 15)": {"peepholes": z(1, 20, dtype=D)},
        "direction is 'both', expected one of forward, reverse, bidirectional": {"direction": "both"},
        "sequence_lens is given, expected none": {"sequence_lens": z(2, dtype="i4")},
        "clip is 1.5, expected 0": {"clip": 1.5}, "input_forget is True, expected False": {"input_forget": True},
        "layout is 1, expected 0": {"layout": 1},
        "w has shape (1, 20, 4), expected (1, 16, 4)": {"hidden_size": 4},
    }),
    "gru_grad": ({**LAYER, "w": z(1, 15, 4, dtype=D), "r": z(1, 15, 5, dtype=D), "y": z(3, 1, 2, 5, dtype=D)}, {
        "gates has shape (3, 1, 2, 19), expected (3, 1, 2, 15), steps, directions, sequences": {
            "gates": z(3, 1, 2, 19, dtype=D)},
        "needs is ('dy',), expected some of dx, dw, dr, dbias": {"gates": z(3, 1, 2, 15, dtype=D), "needs": ("dy",)},
    }),
    **dict.fromkeys(("gelu_grad", "fast_gelu_grad"), ({"dy": LOGITS, "x": LOGITS}, {
        "x has shape (3, 3), expected (3, 4), the shape of dy": {"x": LOGITS[:, :3]},
    })),
    **dict.fromkeys(("bias_gelu_grad_dx", "bias_fast_gelu_grad_dx"), ({"dy": LOGITS, "x": LOGITS, "bias": LOGITS[0]}, {
        "bias has shape (3,), expected (4,), the last dimension of dy": {"bias": LOGITS[:, 0]},
        "bias has shape (3, 4), expected (4,), the last dimension of": {"bias": LOGITS},
        "dy has 0 dimensions, expected at least 1": {"dy": LOGITS[0, 0], "x": LOGITS[0, 0]},
    })),
    "linear_cross_entropy_loss_and_grad": (HEAD | {"out": (np.ones((), "f4"), np.ones((10, 64), "f4"))}, {
        "labels[1] is 33, expected 0 to 32 or ignore_index -100": {"labels": n(0, 33, *[0] * 8)},
        "b has shape (33, 64), expected (34, 64)": {"N": 34}, "x has shape (10, 64), expected (10, 65)": {"K": 65},
        "reduction is 'all', expected one of mean, sum, none": {"reduction": "all"},
    }),
    "max_pool_grad": (CELL | {"indices": z(2, 2, 3, 3, dtype=int)}, {
        "shape is (2, 2), expected 3 to 5 sizes": {"shape": (2, 2)},
        "dy has shape (2, 2, 3, 3), expected (2, 3, …) of 4 dimensions": {"shape": (2, 3, 6, 6)},
        "dy has shape (2, 2, 3, 3), expected (2, 2, …) of 3 dimensions": {"shape": (2, 2, 6)},
        "shape is (2, 2, -6, 6), expected sizes of at least 0": {"shape": (2, 2, -6, 6)},
        "indices has shape (2, 2, 3, 2), expected (2, 2, 3, 3), the shape of dy": {"indices": z(2, 2, 3, 2, dtype=int)},
        "storage_order is 2, expected 0 or 1": {"storage_order": 2},
        "dy has 2 dimensions, expected 3": {"dy": z(2, 2, dtype=D)},
        "indices[0, 0, 0, 0] is 0, expected no index, as shape has a size of 0": {"shape": (2, 2, 0, 3)},
    }),
    "average_pool_grad": (CELL | {"kernel_shape": (2, 2), "strides": (2, 2)}, {
        "shape is (2, 2, 6, 6, 6, 6), expected 3 to 5 sizes": {"shape": (2, 2, 6, 6, 6, 6)},
        "dy has shape (2, 2, 3, 3), expected (2, 2, 4, 3), what the attributes make of shape": {"shape": (2, 2, 8, 6)},
        "kernel_shape is (), expected 2 numbers": {"kernel_shape": ()},
        "kernel_shape is (2, 0), expected numbers of at least 1": {"kernel_shape": (2, 0)},
        "strides is (2,), expected 2 numbers": {"strides": (2,)},
        "strides is (2, 0), expected numbers of at least 1": {"strides": (2, 0)},
        "dilations is (0, 1), expected numbers of at least 1": {"dilations": (0, 1)},
        "pads is (1, 1), expected 4 numbers": {"pads": (1, 1)},
        "pads is (0, 0, -1, 0), expected numbers of at least 0": {"pads": (0, 0, -1, 0)},
        "auto_pad is 'SAME', expected one of NOTSET, SAME_UPPER, SAME_LOWER, VALID": {"auto_pad": "SAME"},
    }),
    "layer_normalization": ({"x": IMAGE, "scale": z(4)}, {
        "scale has shape (3,), expected (4,), the shape of x from axis on": {"scale": C},
        "axis is 3, expected -3 to 2 for an array of 3 dimensions": {"axis": 3},
        "x has 0 dimensions, expected at least 1": {"x": np.float32(1)},
    }),
    "layer_normalization_grad": (
        {"dy": IMAGE, "x": IMAGE, "scale": z(4), "mean": z(2, 3, 1), "inv_std": z(2, 3, 1)}, {
        "x has shape (1, 3, 4), expected (2, 3, 4)": {"x": IMAGE[:1]},
        "mean has shape (3,), expected (2, 3, 1)": {"mean": C},
    }),
    "simplified_layer_normalization_grad": ({"dy": IMAGE, "x": IMAGE, "scale": z(4), "inv_std": z(2, 3, 1)}, {
        "inv_std has shape (3,), expected (2, 3, 1)": {"inv_std": C},
    }),
    "batch_norm_internal": ({"x": IMAGE, "scale": C, "bias": C, "running_mean": C, "running_var": C}, {
        "scale has shape (4,), expected (3,), the size of axis 1 of x": {"scale": z(4)},
    }),
    "batch_normalization_grad": ({"dy": IMAGE, "x": IMAGE, "scale": C, "mean": C, "inv_std": C}, {
        "dy has 1 dimension, expected at least 2": {"dy": C, "x": C},
    }),
    "reduce_sum_training": ({"x": ONES, "axes": (0,)}, {
        "axes is (2,), expected -2 to 1 for an array of 2 dimensions": {"axes": (2,)},
        "axes is (0,), expected no axes for an array of 0 dimensions": {"x": np.float32(1)},
    }),
    "div_grad": ({"dy": ONES, "a": ONES, "b": ONES}, {
        "b has shape (2, 2), expected one that is broadcast with (2, 3), the shape of a": {"b": ONES[:, :2]},
        "dy has shape (1, 3), expected (2, 3), what a and b are broadcast to": {"dy": ONES[:1]},
    }),
    "broadcast_gradient_args": ({"a_shape": (2,), "b_shape": (3,)}, {
        "b_shape is (3,), expected one that is broadcast with (2,), a_shape": {},
        "a_shape is (2, -1), expected sizes of at least 0": {"a_shape": (2, -1)},
    }),
    "reduce_all_l2": ({}, {"arrays is empty, expected at least one array": {"arrays": []}}),
    "concat_training": ({"arrays": [ONES]}, {
        "arrays[1] has shape (2, 4), expected (2, 3)": {"arrays": [ONES, np.ones((2, 4), "f4")]},
        "arrays[1] has shape (4,)": {"arrays": LISTS}, "axis is 2": {"axis": 2},
    }),
    "split_training": ({"x": ONES}, {
        "split is (1, 2), expected sizes of at least 0 that add up to 2": {"split": (1, 2)},
        "split is (3, -1)": {"split": (3, -1)},
    }),
    "is_all_finite": ({"arrays": LISTS}, {
        "isinf_only and isnan_only are both set": {"isinf_only": True, "isnan_only": True},
    }),
    "mixed_precision_scale": ({"scale": z(2), "arrays": LISTS}, {"scale has shape (2,)": {}}),
    "sgd_optimizer": ({"lr": np.float32(0.1), "weights": LISTS}, {
        "gradients has 1 arrays, expected 2, as many as weights": {"gradients": LISTS[:1]},
        "gradients[0] has shape (4,), expected (2, 3), the shape in weights": {"gradients": LISTS[::-1]},
    }),
    "adamw_optimizer": (
        {"lr": np.float32(0.1), "step": np.int64(1), "out": tuple([each.copy() for each in LISTS] for _ in range(3)),
         **dict.fromkeys(("weights", "gradients", "momentums_1", "momentums_2"), LISTS)}, {
        "step is 0, expected at least 1": {"step": np.int64(0)}, "adam_mode is 2, expected 0 or 1": {"adam_mode": 2},
        "correct_bias is False, expected True with adam_mode 0": {"correct_bias": False},
        "beta is 1.5, expected 0 to 1": {"beta": 1.5},
    }),
    "conv_grad": ({"dy": z(2, 6, 4, 4, dtype=D), "x": z(2, 4, 6, 6, dtype=D), "w": z(6, 4, 3, 3, dtype=D)}, {
        "w has 4 dimensions, expected 3, as x has": {"x": z(2, 4, 6, dtype=D)},
        "x has 2 dimensions, expected 3": {"x": z(2, 4, dtype=D)},
        "w has shape (6, 2, 3, 3), expected (6, 4, 3, 3)": {"w": z(6, 2, 3, 3, dtype=D)},
        "dy has shape (2, 6, 4, 5), expected (2, 6, 4, 4)": {"dy": z(2, 6, 4, 5, dtype=D)},
        "group is 3, expected a divisor of the channels of x, 4, and the filters of w, 6": {"group": 3},
        "group is 0, expected a divisor": {"group": 0},
        "kernel_shape is (3, 2), expected (3, 3), as w has": {"kernel_shape": (3, 2)},
        "strides is (1,), expected 2 numbers": {"strides": (1,)},
        "strides is (0, 1), expected numbers of at least 1": {"strides": (0, 1)},
        "dilations is (1, 0), expected numbers of at least 1": {"dilations": (1, 0)},
        "pads is (1, 1), expected 4 numbers": {"pads": (1, 1)},
        "pads is (1, -1, 0, 0), expected numbers of at least 0": {"pads": (1, -1, 0, 0)},
        "auto_pad is 'FULL', expected one of NOTSET": {"auto_pad": "FULL"},
        "needs is ('dz',), expected some of dx, dw, db in a tuple": {"needs": ("dz",)},
        "needs is (), expected some of dx, dw, db in a tuple": {"needs": ()},
        "needs is 'dx', expected some of dx, dw, db in a tuple": {"needs": "dx"},
    }),
    "conv_transpose_grad": (
        {"dy": z(2, 3, 8, 8, dtype=D), "x": z(2, 4, 4, 4, dtype=D), "w": z(4, 3, 2, 2, dtype=D), "strides": (2, 2)}, {
        "w has 4 dimensions, expected 3, as x has": {"x": z(2, 4, 6, dtype=D)},
        "w has shape (6, 3, 2, 2), expected (4, 3, 2, 2)": {"w": z(6, 3, 2, 2, dtype=D)},
        "dy has shape (2, 3, 8, 9), expected (2, 3, 8, 8)": {"dy": z(2, 3, 8, 9, dtype=D)},
        "group is 3, expected a divisor of the channels of x, 4": {"group": 3},
        "kernel_shape is (3, 2), expected (2, 2), as w has": {"kernel_shape": (3, 2)},
        "strides is (0, 1), expected numbers of at least 1": {"strides": (0, 1)},
        "output_padding is (1,), expected 2 numbers": {"output_padding": (1,)},
        "output_shape is (1, 2, 3), expected 2 numbers": {"output_shape": (1, 2, 3)},
        "auto_pad is 'FULL', expected one of NOTSET": {"auto_pad": "FULL"},
    }),
    "gather": ({"x": np.ones((2, 3), "f4"), "indices": NONE}, {"axis is 2, expected -2 to 1": {"axis": 2}}),
    "gather_elements": ({"x": ONES, "indices": NONE}, {
        "indices has shape (3,), expected 2 dimensions, as many as x": {"indices": NONE[0]},
        "axis is 2, expected -2 to 1 for an array of 2": {"axis": 2},
        "indices has shape (2, 3), expected at most 2 on axis 1, as x has": {"x": ONES[:, :2]},
    }),
    "gather_elements_grad": (ALONG, {
        "indices has shape (2, 2), expected (2, 3), the shape of dy": {"indices": NONE[:, :2]},
        "indices has shape (2, 3), expected at most 1 on axis 0, as x has": {"shape": (1, 3), "axis": 1},
        "indices has shape (2, 3), expected 3 dimensions, as many as x": {"shape": (2, 3, 1)},
        "indices[0, 0] is 0, expected no index, as the axis has size 0": {"shape": (2, 0), "axis": 1},
    }),
    "gather_nd": ({"x": ONES, "indices": NONE}, {
        "indices has shape (2, 3), expected 1 to 2 on the last axis, one for an axis": {},
        "indices has shape (2, 0), expected 1 to 2 on the last axis, one for an axis": {"indices": NONE[:, :0]},
        "batch_dims is 2, expected 0 to 1 for 2 and 2 dimensions": {"batch_dims": 2},
        "batch_dims is -1, expected 0 to 1": {"batch_dims": -1},
        "indices[0, 0] is 0, expected no index, as the axis has size 0": {"x": z(0, 3), "indices": NONE[:, :1]},
    }),
    "gather_nd_grad": (TUPLES, {
        "indices has shape (2, 1), expected it to start with (4,), as x does": {"batch_dims": 1},
        "dy has shape (2, 3), expected (2,), indices.shape[:-1] and shape's axes behind": {
            "indices": NONE[:, :2], "dy": ONES},
    }),
    "slice_grad": (SLICE, {
        "dy has shape (2, 3), expected (3, 3), the shape of the slice": {"ends": (3,)},
        "ends has 2 entries, expected 1": {"ends": (3, 1)},
        "axes has 2 entries, expected 1, as many as starts": {"axes": (0, 1)},
        "steps has 0 entries, expected 1, as many as starts": {"steps": ()},
        "axes has 2, expected -2 to 1": {"axes": (2,)},
        "axes is (0, -2), expected different axes": {"starts": (0, 0), "ends": (2, 2), "axes": (0, -2)},
        "steps is (0,), expected no 0": {"steps": (0,)},
        "axes has 0, expected no axis, as shape has none": {"dy": ONES[0, 0], "shape": ()},
        "axes has 2, expected": {"starts": (0, 0, 0), "ends": (2, 3, 1)},
    }),
    "softmax_cross_entropy": ({"logits": LOGITS, "labels": LOGITS}, {
        "labels has shape (2, 4), expected (3, 4), that of the logits": {"labels": LOGITS[:2]},
        "logits has 0 dimensions, expected at least 1": {"logits": LOGITS[0, 0]},
    }),
    "sparse_softmax_cross_entropy": ({"logits": LOGITS, "labels": LABELS}, {
        "labels has shape (2,), expected (3,), that of the logits": {"labels": LABELS[:2]},
        "weight has shape (2,), expected (3,), the shape of": {"weight": WEIGHT[:2]},
        "reduction is 'all', expected one of none, mean": {"reduction": "all"},
    }),
    "softmax_cross_entropy_grad": ({"dy": WEIGHT, "log_prob": LOGITS, "labels": LOGITS}, {
        "dy has shape (3,), expected (), what the reduction gives": {},
    }),
    "sparse_softmax_cross_entropy_grad": ({"dy": WEIGHT, "log_prob": LOGITS, "labels": LABELS}, {
        "dy has shape (3,), expected (), what the reduction gives": {},
    }),
    "sink_softmax": ({"x": X, "sink": z(4)}, {"sink has shape (4,), expected (3,)": {}}),
    "attention": ({"q": Q, "k": K, "v": K}, {
        "q has 3 dimensions, expected 4, as cu_seqlens_q is None": {"q": Q[0]},
        "v has 3 dimensions, expected 4, as cu_seqlens_q is None": {"v": K[0]},
        "q has heads of 0 numbers, expected 1 to 256": {"q": Q[..., :0]},
        "q has heads of 257 numbers, expected 1 to 256": {"q": z(1, 1, 1, 257)},
        "v has heads of 257 numbers, expected 1 to 256": {"v": z(2, 2, 7, 257)},
        "k has 3 heads, expected a divisor of 4, the heads of q": {"k": Q[:, :3], "v": Q[:, :3]},
        "k has 0 heads, expected a divisor of 4, the heads of q": {"k": K[:, :0], "v": K[:, :0]},
        "k has shape (1, 2, 7, 8), expected (2, 2, 7, 8), the batch and the size of a head of q": {"k": K[:1]},
        "k has shape (2, 2, 7, 7), expected (2, 2, 7, 8)": {"k": K[..., :7]},
        "v has shape (2, 2, 6, 8), expected (2, 2, 7, 8), the batch, the heads and the length of k": {"v": K[:, :, 1:]},
        "mask has shape (5, 6), expected (2, 4, 5, 7), that of the scores": {"mask": z(5, 6)},
        "mask has shape (1, 1, 1, 1, 1), expected (2, 4, 5, 7)": {"mask": z(1, 1, 1, 1, 1)},
        "sink has shape (2,), expected (4,), the heads of q": {"sink": z(2)},
        "key_lengths has shape (3,), expected (2,), the batch of q": {"key_lengths": z(3, dtype=int)},
        "key_lengths[1] is 8, expected 0 to 7": {"key_lengths": n(7, 8)},
        "key_lengths[0] is -1, expected 0 to 7": {"key_lengths": n(-1, 8)},
        "scale is inf, expected a finite number": {"scale": INF},
        "softcap is -1.0, expected a finite number of at least 0": {"softcap": -1.0},
        "dropout is 1.5, expected 0 to 1": {"dropout": 1.5},
        "causal is 'left', expected a bool or one of top_left, bottom_right": {"causal": "left"},
        "window is (1, -2), expected sizes of at least 0, or -1 or None for no limit": {"window": (1, -2)},
        "layout is 'LBHD', expected one of BHLD, BLHD": {"layout": "LBHD"},
        "seed has shape (2,), expected (), one number": {"seed": z(2, dtype=int), "dropout": 0.5},
        "needs is ('x',), expected some of y, lse in a tuple": {"needs": ("x",)},
        "cu_seqlens_k is given, expected None, as cu_seqlens_q is None": {"cu_seqlens_k": n(0, 1)},
        "q has 4 dimensions, expected 3, as cu_seqlens_q is given": PACKED | {"q": Q},
        "mask is given, expected None, as cu_seqlens_q is given": PACKED | {"mask": Q[0, 0]},
        "k has 3 places, expected 4, those of q, as cu_seqlens_k is None": PACKED | {"k": Q[0, :3]},
        "cu_seqlens_q has shape (0,), expected (1,)": PACKED | {"cu_seqlens_q": z(0, dtype=int)},
        "cu_seqlens_k has shape (1,), expected (2,)": PACKED | {"cu_seqlens_k": n(0)},
        "cu_seqlens_q[1] is 5, expected 0 to 4, rising": PACKED | {"cu_seqlens_q": n(0, 5)},
        "cu_seqlens_q[1] is 1, expected 0 to 4, rising": PACKED | {"cu_seqlens_q": n(2, 1)},
        "cu_seqlens_k[0] is -1, expected 0 to 4, rising": PACKED | {"cu_seqlens_k": n(-1, 1)},
        "out for y overlaps q, expected separate memory": {"out": Q},
    }),
    "attention_grad": ({"dy": Q, "q": Q, "k": K, "v": K, "y": Q, "lse": Q[..., 0]}, {
        "dy has shape (2, 4, 5, 7), expected (2, 4, 5, 8), the": {"dy": Q[..., :7]},
        "lse has shape (2, 4), expected (2, 4, 5), batch": {"lse": Q[:, :, 0, 0]},
        "needs has dmask, expected it to have mask as an argument": {"needs": ("dmask",)},
        "key_lengths[0] is 9, expected 0 to 7": {
            "key_lengths": n(9, 1), "out": tuple(np.ones_like(each) for each in (Q, K, K))},
    }),
}  # fmt: skip
# The same with what has another type than is expected.
TYPES = {
    "bias_softmax": {
        "axis is (0, 1), expected an int": {"axis": (0, 1)},
        "is_inner_broadcast is 1, expected a bool": {"is_inner_broadcast": 1},
    },
    "softmax_dropout_grad": {"axis is (0, 1), expected an int": {"axis": (0, 1)}},
    "dropout": {
        "seed has dtype float64, expected one of int32, int64": {"seed": 1.5},
        "ratio is 'high', expected a number": {"ratio": "high"},
        "training_mode is 1, expected a bool": {"training_mode": 1},
    },
    "dropout_grad": {"mask has dtype float32, expected one of bool": {"mask": ONES}},
    "fake_quant_grad": {"mask has dtype float32, expected one of bool": {"mask": ONES}},
    "quantized_matmul_grad": {"b has dtype int8, expected uint8, as bits is 4": {"b": z(4, 16, dtype="i1")}},
    "resize_grad": {"scales is '2', expected a tuple of numbers": {"scales": "2"}},
    "lstm_training": {
        "r has dtype float32, expected float64, the dtype of x": {"r": z(1, 20, 5)},
        "x has dtype float16, expected one of float32, float64": {"x": z(3, 2, 4, dtype="f2")},
    },
    "gelu_grad": GELU, "fast_gelu_grad": GELU,
    "bias_gelu_grad_dx": {"bias has dtype float64, expected float32, the dtype of dy": {"bias": z(4, dtype=D)}},
    "linear_cross_entropy_loss_and_grad": {
        "b has dtype uint8, expected floats, as bits is 0": {"b": z(33, 64, dtype="u1")},
        "scales is None, expected an array, as bits is not 0": {"b": z(33, 32, dtype="u1"), "bits": 4},
    },
    "max_pool_grad": {"indices has dtype int32, expected one of int64": {"indices": z(2, 2, 3, 3, dtype="i4")}},
    "average_pool_grad": {
        "kernel_shape is 2.0, expected an int": {"kernel_shape": (2.0, 2)},
        "ceil_mode is 1, expected a bool": {"ceil_mode": 1},
    },
    "layer_normalization": {
        "scale has dtype float64, expected float32, the dtype of x": {"scale": z(4, dtype=D)},
        "axis is (1, 2), expected an int": {"axis": (1, 2)},
    },
    "batch_norm_internal": {
        "epsilon is 'a', expected a number": {"epsilon": "a"},
        "training_mode is 1, expected a bool": {"training_mode": 1},
    },
    "reduce_sum_training": {
        "axes is 1.5, expected an int": {"axes": (1.5,)}, "keepdims is 1, expected a bool": {"keepdims": 1},
        "x has dtype uint8, expected one of float32": {"x": ONES.astype("u1")},
    },
    "div_grad": {"a has dtype float64, expected float32, the dtype of dy": {"a": ONES.astype(D)}},
    "broadcast_gradient_args": {"a_shape is 2, expected a tuple of ints": {"a_shape": 2}},
    "reduce_all_l2": {
        "arrays is ndarray, expected a list": {"arrays": ONES},
        "arrays[1] has dtype float64, expected float32, the dtype of arrays[0]": {"arrays": [ONES, ONES.astype(D)]},
    },
    "conv_grad": {
        "x has dtype float64, expected float32, the dtype of dy": {"dy": z(2, 6, 4, 4)},
        "x has dtype int32, expected one of": {"x": z(2, 4, 6, 6, dtype="i4")},
        "out is ndarray, expected a tuple of 2 arrays": {"needs": ("dx", "db"), "out": np.ones((2, 4, 6, 6))},
    },
    "gather_elements": {"axis is (0, 1), expected an int": {"axis": (0, 1)}},
    "gather_nd": {"indices has dtype float32, expected one of int32, int64": {"indices": ONES}},
    "slice_grad": {
        "starts is 0.5, expected an int": {"starts": (0.5,)}, "ends is 2, expected a tuple of ints": {"ends": 2},
    },
    "sparse_softmax_cross_entropy": {
        "labels has dtype float32, expected one of int32, int64": {"labels": LOGITS[:, 0]},
    },
    "attention": {
        "k has dtype float64, expected float32, the dtype of q": {"k": K.astype(D)},
        "mask has dtype float64, expected float32, the dtype of q": {"mask": z(7, dtype=D)},
        "mask has dtype int64, expected one of bool, float32": {"mask": z(7, dtype=int)},
        "key_lengths has dtype float64, expected one of int32, int64": {"key_lengths": z(2, dtype=D)},
        "causal is 1, expected a bool": {"causal": 1},
        "window is 3, expected None or a tuple (left, right)": {"window": 3},
    },
    "attention_grad": {
        "mask has dtype bool, expected one of floats, as needs has": {
            "mask": np.ones((5, 7), bool), "needs": ("dmask",)},
        "q has dtype float32, expected float16, the dtype of dy": {"dy": Q.astype("f2")},
    },
}  # fmt: skip
CASES = [(ValueError, name, change, text) for name, (_, cases) in VALUES.items() for text, change in cases.items()]
CASES += [(TypeError, name, change, text) for name, cases in TYPES.items() for text, change in cases.items()]


@pytest.mark.any_cpu
@pytest.mark.parametrize(("kind", "name", "change", "text"), CASES, ids=[f"{each[1]}: {each[3]}" for each in CASES])
def test_is_refused(kind, name, change, text):
    """With these words, before anything is written."""
    given = VALUES[name][0] | change
    before = [array.copy() for array in arrays_of({"out": [*given.get("out", ())]})]
    with pytest.raises((kind, NotImplementedError)) as caught:
        getattr(opgrad, name)(**given)
    assert str(caught.value).startswith(f"{name}: {text}")
    for array, was in zip(arrays_of({"out": [*given.get("out", ())]}), before, strict=True):
        np.testing.assert_array_equal(array, was)
