"""Models that packages ship: where each stands, what it reads, and how it is fetched.

Only packages are listed whose licence lets everyone run and change the models. The versions are fixed, so that two runs
are of the same files.
"""

import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Random = np.random.Generator
Input = Callable[[Random], np.ndarray]


@dataclass(frozen=True)
class RealModel:
    """A file inside a package.

    task: what the model is for. package: the requirement, with its version. file: its path in the wheel.
    inputs: what makes an example of each input. output: the output that the loss is of.
    rate: the learning rate.
    """

    task: str
    package: str
    licence: str
    file: str
    inputs: Mapping[str, Input]
    output: str
    rate: float = 1e-4

    @property
    def name(self) -> str:
        """The file's name without its folders."""
        return Path(self.file).name


def normal(*shape: int, scale: float = 1.0) -> Input:
    """Numbers of a normal distribution."""
    return lambda random: (scale * random.normal(size=shape)).astype(np.float32)


def whole(end: int, *shape: int, dtype: str = "int64") -> Input:
    """Whole numbers from 0 to below `end`."""
    return lambda random: random.integers(0, end, shape).astype(dtype)


def constant(value: int) -> Input:
    """A single int64."""
    return lambda random: np.array(value, np.int64)


RAPID = "rapidocr-onnxruntime==1.4.4", "Apache-2.0", "rapidocr_onnxruntime/models/"
DDDD = "ddddocr==1.6.1", "MIT", "ddddocr/"
SILERO = "silero-vad==6.2.3", "MIT", "silero_vad/data/"
TASHKEEL = "text2tashkeel==0.1.0", "Apache-2.0", "text2tashkeel/models/"
MAGIKA = "magika==1.0.3", "Apache-2.0", "magika/models/standard_v3_3/"
VOICE = {"input": normal(2, 576, scale=0.1), "state": normal(2, 2, 128, scale=0.3), "sr": constant(16000)}
HALF_VOICE = {name: VOICE[name] for name in ("input", "state")}
ONE_VOICE = {"input": normal(1, 576, scale=0.1), "state": normal(2, 1, 128, scale=0.3)}
SEQUENCE = {"input": normal(4, 576, scale=0.1), "h": normal(1, 1, 128, scale=0.3), "c": normal(1, 1, 128, scale=0.3)}
MODELS: list[RealModel] = []


def add(task: str, source: tuple[str, str, str], file: str, inputs: Mapping[str, Input], output: str, **more) -> None:
    """Add a model of a package, its licence and the folder in it."""
    package, licence, folder = source
    MODELS.append(RealModel(task, package, licence, folder + file, inputs, output, **more))


add("text detection", RAPID, "ch_PP-OCRv4_det_infer.onnx", {"x": normal(1, 3, 96, 128)}, "sigmoid_0.tmp_0", rate=1e-6)
add("text recognition", RAPID, "ch_PP-OCRv4_rec_infer.onnx", {"x": normal(2, 3, 48, 96)}, "softmax_11.tmp_0", rate=1e-6)
ANGLE = {"x": normal(2, 3, 48, 192)}
add("angle of text", RAPID, "ch_ppocr_mobile_v2.0_cls_infer.onnx", ANGLE, "save_infer_model/scale_0.tmp_1", rate=1e-6)
add("file types", MAGIKA, "model.onnx", {"bytes": whole(257, 4, 2048, dtype="int32")}, "target_label")
add("captcha", DDDD, "common.onnx", {"input1": normal(1, 1, 64, 160)}, "387")
add("captcha, quantized", DDDD, "common_old.onnx", {"input1": normal(1, 1, 64, 160)}, "387")
add("object detection", DDDD, "common_det.onnx", {"images": normal(1, 3, 416, 416, scale=50)}, "output")
add("voice activity", SILERO, "silero_vad.onnx", VOICE, "output")
add("voice activity", SILERO, "silero_vad_16k_op15.onnx", VOICE, "output")
add("voice activity", SILERO, "silero_vad_16k_sequence.onnx", SEQUENCE, "speech_probs")
add("voice activity", SILERO, "silero_vad_half.onnx", HALF_VOICE, "output", rate=1e-5)
add("voice activity", SILERO, "silero_vad_op18_ifless.onnx", VOICE, "output")
add("voice activity", SILERO, "silero_vad_openvino_16k.onnx", ONE_VOICE, "output", rate=1e-5)
add("diacritics, quantized", TASHKEEL, "bilstm.int8.onnx", {"input_ids": whole(30, 2, 24)}, "logits")
add("diacritics, quantized", TASHKEEL, "rawi_v3.int8.onnx", {"input": whole(30, 2, 24)}, "value")


def fetch(folder: Path) -> None:
    """Download the packages, without what they need, and unpack their models into the folder."""
    for package in dict.fromkeys(model.package for model in MODELS):
        wheels = folder / package
        if not any(wheels.glob("*.whl")):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, package]
            subprocess.run(command, check=True)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as opened:
                for name in opened.namelist():
                    if any(model.file == name for model in MODELS) and not (folder / name).exists():
                        opened.extract(name, folder)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
