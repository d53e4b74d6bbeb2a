"""The page of examples/browser in the system's Chromium: it learns, keeps, and asks nobody."""

import re
import shutil

import numpy as np
import pytest
from artifact_sets import EXAMPLES
from snippets import snippets

from opgrad.training import ArtifactSet, Trainer, read_checkpoint, write_checkpoint
from opgrad.training.api import CheckpointState
from opgrad.training.export import export_step

WAIT = 180_000  # milliseconds; machines that do other work, too, are slow
STEPS = 30  # of an epoch
PHONE = {"width": 390, "height": 844}


class Page:
    """The page, what it asked for, and what went wrong in it."""

    def __init__(self, context, address, query=""):
        self.page, self.requests, self.errors = context.new_page(), [], []
        self.page.set_default_timeout(WAIT)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.answer = self.page.goto(address + query)
        self.ready()

    def ready(self):
        self.page.locator("#train:enabled").wait_for(timeout=WAIT)

    def reload(self):
        self.page.reload()
        self.ready()

    def text(self, place):
        return self.page.inner_text(place)

    def accuracy(self):
        return float(self.text("#accuracy").split()[0]) / 100

    def steps(self):
        return int(self.text("#steps").replace(",", ""))

    def train(self, epochs):
        steps = self.steps() + STEPS * epochs
        self.page.fill("#epochs", str(epochs))
        self.page.click("#train")
        self.page.locator("#steps", has_text=re.compile(f"^{steps:,}$")).wait_for(timeout=WAIT)
        self.stopped()

    def stopped(self):
        """Wait until it trains no more, and what it learned is kept."""
        self.page.locator("#train", has_text="Train").wait_for(timeout=WAIT)
        self.page.locator("#saved", has_text="Kept").wait_for()

    def draw(self, *points):
        box = self.page.locator("#pad").bounding_box()
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
        self.page.mouse.move(*places[0])
        self.page.mouse.down()
        for place in places[1:]:
            self.page.mouse.move(*place, steps=5)
        self.page.mouse.up()
        self.page.locator("#answer", has_text="It takes this for").wait_for()

    def learn(self, label):
        self.page.locator("#labels button").nth(label).click()
        self.page.locator("#answer").filter(has_text=re.compile("Learned|knew")).wait_for(timeout=WAIT)
        return self.text("#answer")


UNKNOWN = "\u2013"  # in the place of a figure
SEVEN = (0.3, 0.2), (0.7, 0.2), (0.45, 0.85)
SHAPE = (0.2, 0.2), (0.8, 0.2), (0.8, 0.8), (0.2, 0.8), (0.2, 0.5), (0.8, 0.5)  # no digit, until one says so


@pytest.fixture
def opened(chromium, serving, site, tmp_path):
    address, contexts = serving(site), []

    def made(folder="profile", query="", **settings):
        context = chromium(tmp_path / folder, accept_downloads=True, **settings)
        contexts.append(context)
        return Page(context, address, query), context

    yield made
    for context in contexts:
        context.close()


def test_it_learns_keeps_and_asks_nobody(opened, tmp_path):
    page, _ = opened(viewport={"width": 1200, "height": 860})
    assert "default-src 'none'" in page.answer.headers["content-security-policy"]
    assert "WebAssembly" in page.text("#runtime") or "WebGPU" in page.text("#runtime")
    page.train(16)
    assert page.accuracy() >= 0.95
    page.draw(*SEVEN)
    page.page.click("#clear")
    page.draw(*SHAPE)
    found = re.search(r"went from ([\d.]+) % to ([\d.]+) %", page.learn(4))
    assert float(found[1]) < 50 < 90 <= float(found[2])
    page.train(2)
    assert page.accuracy() >= 0.95
    page.page.locator("#answer", has_text="It takes this for a 4").wait_for()
    page.page.screenshot(path=tmp_path / "desktop.png", full_page=True)
    accuracy, steps = page.text("#accuracy"), page.text("#steps")
    page.reload()
    assert (page.text("#accuracy"), page.text("#steps")) == (accuracy, steps)
    assert page.page.locator("#mine figure").count() == 1
    assert not page.errors
    assert {url.split("/")[2] for url in page.requests if url.startswith("http")} == {page.answer.url.split("/")[2]}


def test_it_says_what_it_runs_on(opened):
    """A software adapter is slower than WebAssembly: it is taken when asked for, alone."""
    assert opened("none")[0].text("#runtime") == "Runs on WebAssembly: this browser offers no WebGPU"
    page, context = opened("software", webgpu=True)
    assert page.text("#runtime") == "Runs on WebAssembly: this browser's WebGPU has no GPU"
    page.page.close()  # the first tab keeps the weights, others do not
    asked = Page(context, page.answer.url, "?runtime=webgpu")
    assert asked.text("#runtime") == "Runs on WebGPU"
    asked.train(1)
    assert asked.text("#steps") == "30"
    assert asked.accuracy() > 0.5
    assert not asked.errors


def test_a_phone_shows_all_without_scrolling_sideways(opened, tmp_path):
    page, _ = opened(viewport=PHONE, device_scale_factor=2, has_touch=True, is_mobile=True)
    page.page.screenshot(path=tmp_path / "phone.png", full_page=True)
    for name in ("train", "pad", "labels", "reset"):
        box = page.page.locator(f"#{name}").bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= PHONE["width"], name


def test_weights_go_to_opgrad_and_back(opened, tmp_path):
    """Saved to a file and gone on with here; what opgrad wrote is opened there."""
    page, _ = opened()
    page.train(2)
    with page.page.expect_download() as download:
        page.page.click("#save")
    download.value.save_as(tmp_path / "digits.safetensors")
    state = CheckpointState.load_checkpoint(tmp_path / "digits.safetensors")
    assert [name for name, _ in state.parameters] == sorted(name for name, _ in state.parameters)
    artifacts = ArtifactSet.load(EXAMPLES / "digits")
    trainer = Trainer(artifacts)
    trainer.restore(read_checkpoint(tmp_path / "digits.safetensors"))
    assert trainer.optimizer.steps == page.steps() == 2 * STEPS
    batch = {"pixels": np.zeros((2, 64), np.float32), "labels": np.zeros(2, np.int64)}
    trainer.step(batch)
    write_checkpoint(trainer.checkpoint(), tmp_path / "checkpoint")
    made = export_step(artifacts, tmp_path / "step.onnx", flat=True, checkpoint=tmp_path / "checkpoint")
    page.page.set_input_files("#file", made.files["weights"])
    page.page.locator("#steps", has_text="61").wait_for()


def test_bad_files_and_a_full_disk_lose_nothing(opened, tmp_path, site):
    page, context = opened()
    page.train(1)
    accuracy = page.text("#accuracy")
    content = (site / "step.safetensors").read_bytes()
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b"no weights"):
        (tmp_path / "bad.safetensors").write_bytes(damaged)
        page.page.set_input_files("#file", tmp_path / "bad.safetensors")
        page.page.locator("#message", has_text="the weights are damaged").wait_for()
        assert page.text("#accuracy") == accuracy
    full = "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }"
    context.new_cdp_session(page.page).send("Runtime.evaluate", {"expression": full})  # which CSP lets do so
    page.page.click("#train")
    page.page.locator("#message", has_text="no room to keep the weights").wait_for()
    page.page.locator("#train", has_text="Train").wait_for()
    assert page.text("#steps") == "60"
    page.reload()
    assert (page.text("#accuracy"), page.text("#steps")) == (accuracy, "30")  # of the last save that was whole


def test_a_tab_closed_in_the_middle_of_a_save_loses_nothing(opened):
    page, context = opened()
    page.train(1)
    page.page.fill("#epochs", "500")
    for _ in range(3):
        page.page.click("#train")
        page.page.wait_for_timeout(700)
        address = page.page.url
        page.page.close()  # while epochs end and are kept
        page = Page(context, address)
        assert not page.page.is_visible("#message")
        assert page.steps() >= STEPS


DAMAGE = """() => new Promise((resolve) => {
  indexedDB.open("opgrad-digits").onsuccess = ({ target: { result: database } }) => {
    const store = database.transaction("slots", "readwrite").objectStore("slots");
    store.getAll().onsuccess = ({ target: { result: records } }) => store.getAllKeys().onsuccess = ({ target }) => {
      const newest = records.reduce((best, each, index) => each.number > records[best].number ? index : best, 0);
      const content = records[newest].content.slice(0, -4);
      store.put({ ...records[newest], content }, target.result[newest]).onsuccess = () => resolve(records.length);
    };
  };
})"""


def test_a_save_that_is_cut_short_gives_way_to_the_one_before(opened):
    page, _ = opened()
    page.train(2)
    assert page.page.evaluate(DAMAGE) == 2
    page.reload()
    assert "the weights are damaged" in page.text("#message")
    assert "Older ones are here." in page.text("#message")
    assert page.text("#steps") == "30"


def test_a_second_tab_overwrites_nothing_and_says_so(opened):
    page, context = opened()
    page.train(4)
    accuracy = page.text("#accuracy")
    second = Page(context, page.answer.url)
    assert second.text("#steps") == page.text("#steps") == "120"
    assert "Another tab of this page keeps its weights" in second.text("#saved")
    second.page.fill("#epochs", "1")
    second.page.click("#train")
    second.page.locator("#steps", has_text="150").wait_for()
    second.page.locator("#train", has_text="Train").wait_for()
    assert "What this one learns is not kept" in second.text("#saved")
    second.page.click("#reset")
    second.page.click("#forget")
    second.page.locator("#steps", has_text=re.compile("^0$")).wait_for()
    page.reload()
    assert (page.text("#accuracy"), page.text("#steps")) == (accuracy, "120")
    page.page.close()
    second.reload()
    second.train(1)
    assert second.text("#steps") == "150"
    assert not second.errors


def test_start_anew_asks(opened):
    page, _ = opened()
    page.page.click("#reset")  # there is nothing to forget
    page.page.wait_for_timeout(300)
    assert not page.page.is_visible("#asking")
    page.train(1)
    for answer in ("#stay", None):
        page.page.click("#reset")
        assert page.text("#question") == "Forget 30 steps of training? A file that you saved stays."
        page.page.click(answer) if answer else page.page.keyboard.press("Escape")
        assert not page.page.is_visible("#asking")
        assert page.text("#steps") == "30"
    page.reload()
    assert page.text("#steps") == "30"
    page.draw(*SEVEN)
    page.learn(7)
    page.page.click("#reset")
    assert "and 1 digit that you drew" in page.text("#question")
    page.page.click("#forget")
    page.page.locator("#steps", has_text=re.compile("^0$")).wait_for()
    page.reload()
    assert page.text("#steps") == "0"
    assert page.page.locator("#mine figure").count() == 0


def test_the_loss_follows_what_was_taught(opened):
    page, _ = opened()
    assert page.text("#loss") == UNKNOWN
    page.train(2)
    trained = page.text("#loss")
    page.draw(*SHAPE)
    taken = int(re.search(r"in (\d+) steps", page.learn(4))[1])
    assert page.text("#loss") != trained
    assert float(page.text("#loss")) > 0
    assert page.steps() == 2 * STEPS + taken
    page.reload()
    assert page.text("#loss") == UNKNOWN


CORNER = """() => Array.from(document.querySelector("#seen").getContext("2d").getImageData(0, 0, 1, 1).data)"""
BRIGHTEST = """() => Math.max(...document.querySelector("#seen").getContext("2d").getImageData(0, 0, 8, 8).data
    .filter((_, index) => index % 4 === 0))"""


def test_the_preview_in_the_dark(opened, tmp_path):
    page, _ = opened(color_scheme="dark")
    assert page.page.evaluate(CORNER)[0] < 60
    page.draw(*SEVEN)
    assert page.page.evaluate(BRIGHTEST) > 150
    page.page.screenshot(path=tmp_path / "dark.png", full_page=True)
    for scheme, in_scheme in (("light", lambda grey: grey > 200), ("dark", lambda grey: grey < 60)):
        page.page.emulate_media(color_scheme=scheme)
        for _ in range(100):  # the page is told of the change later
            if in_scheme(page.page.evaluate(CORNER)[0]):
                break
            page.page.wait_for_timeout(100)
        assert in_scheme(page.page.evaluate(CORNER)[0])
    assert not page.errors


def test_a_page_loaded_once_works_without_the_server(opened, serving, site):
    page, context = opened()
    assert "It works without a network, too." in page.text("#offline")
    page.train(1)
    address = page.answer.url
    serving.stop(address)
    page.reload()
    assert page.text("#steps") == "30"
    page.train(1)
    page.page.close()
    again = Page(context, address, "?runtime=wasm")
    assert again.text("#steps") == "60"
    again.draw(*SEVEN)
    assert not again.page.is_visible("#message")


def test_pausing_keeps_what_was_learned(opened):
    page, _ = opened()
    page.page.fill("#epochs", "500")
    page.page.click("#train")
    page.page.locator("#saved", has_text="Kept").wait_for()
    page.page.click("#train")
    page.stopped()
    steps = page.steps()
    page.page.wait_for_timeout(500)
    assert page.steps() == steps
    page.reload()
    assert page.steps() == steps


def test_damaged_files_are_said(serving, chromium, site, tmp_path):
    shutil.copytree(site, tmp_path / "site")
    for name in ("step.onnx", "step.safetensors", "digits.bin"):
        whole = (tmp_path / "site" / name).read_bytes()
        (tmp_path / "site" / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with chromium(tmp_path / name) as context:
            page = context.new_page()
            page.goto(serving(tmp_path / "site"))
            page.locator("#message", has_text=f"{name} is damaged").wait_for(timeout=WAIT)
        (tmp_path / "site" / name).write_bytes(whole)


def test_the_page_of_the_tutorial_learns(chromium, serving, site, tmp_path):
    """Its HTML and JavaScript, as they stand there, beside the files that it says."""
    for name in ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm", "step.mjs"):
        shutil.copyfile(site / name, tmp_path / name)
    export_step(EXAMPLES / "digits", tmp_path / "step.onnx", flat=True, models=["eval", "infer"])
    codes = {kind: code for kind, _, code in snippets("docs/start/browser.md")}
    (tmp_path / "index.html").write_text(codes["html"])
    (tmp_path / "main.mjs").write_text(codes["js"])
    with chromium() as context:
        page = context.new_page()
        page.goto(serving(tmp_path))
        page.locator("body[data-done]").wait_for(timeout=WAIT)
        assert float(page.inner_text("#loss").split()[-1]) < 0.3
