"""The page and the Node script of examples/tune/page: adapters learn there, and opgrad takes them."""

import re
import subprocess

import pytest
from artifact_sets import EXAMPLES, loaded
from language_models import make_folder, quantize, write_lines

from opgrad.tune import Tuner

PAGE = EXAMPLES / "tune" / "page"
ANSWER = "the tree is red ."
CHAT = {"messages": [{"role": "user", "content": "what is red ?"}, {"role": "assistant", "content": ANSWER}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("model"), cached=True)
    quantize(folder / "model.onnx")
    return folder


@pytest.fixture(scope="module")
def tune_site(tmp_path_factory, model):
    build = loaded(PAGE / "build.py")
    build.PROMPTS = ("what is red ?",)
    folder = tmp_path_factory.mktemp("site")
    data = write_lines(folder / "data.jsonl", [CHAT] * 8)
    build.build(model, data, folder, EXAMPLES / "browser" / "node_modules")
    return folder


def test_page(tune_site, model, chromium, serving, tmp_path):
    with chromium() as context:
        page, problems = context.new_page(), []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(serving(tune_site))
        page.locator("#train:enabled").wait_for(timeout=60_000)
        assert "numbers are trained on 8 examples" in page.inner_text("#runtime")
        page.fill("#epochs", "40")
        page.click("#train")
        page.get_by_role("button", name="Train", exact=True).wait_for(timeout=120_000)
        assert page.inner_text("#steps") == "40"
        assert float(page.inner_text("#loss")) < 0.5
        assert page.inner_text("#texts .answer").replace(" ", "") == ANSWER.replace(" ", "")
        assert page.is_hidden("#message")
        assert not problems
        with page.expect_download() as download:
            page.click("#save")
        download.value.save_as(tmp_path / "trained.safetensors")
    assert Tuner(model, adapter=tmp_path / "trained.safetensors").write("what is red ?", max_new_tokens=8) == ANSWER


@pytest.mark.parametrize("kind", ["node", "web"])
def test_node(tune_site, model, kind, tmp_path):
    output = tmp_path / "trained.safetensors"
    command = ["node", str(PAGE / "train.mjs"), str(tune_site), str(output), "40", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    losses = [float(each) for each in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 5
    assert Tuner(model, adapter=output).write("what is red ?", max_new_tokens=8) == ANSWER
