"""opgrad's loss in language models as transformers has them: like the model's own, and without stored logits."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import pickle
import sys
import types
from typing import ClassVar

import pytest
from callers import call_at_once
from samples import refused

torch = pytest.importorskip("torch")
functional = torch.nn.functional

import small_causal_models  # noqa: E402

import opgrad.torch  # noqa: E402
from opgrad.torch.patching import Deferred  # noqa: E402

CLASSES = 11


def token_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, *, shift=1):
    """As transformers has it: of causal models with shift 1, of masked ones with 0."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, shift), value=ignore_index)[..., shift:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    flat = shift_labels.reshape(-1)
    found = functional.cross_entropy(logits.float().view(-1, vocab_size), flat, reduction=reduction)
    return found if num_items_in_batch is None else found / num_items_in_batch


@dataclasses.dataclass
class Output:
    loss: object = None
    logits: object = None


class Model(torch.nn.Module):
    """A loss function that can be set, an output layer, logits beside the loss, and a layer before its head."""

    own_loss = staticmethod(token_loss)

    def __init__(self, change=lambda logits: logits, layer=None):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(CLASSES, 4), torch.nn.Linear(4, CLASSES, bias=False)
        self.change, self.layer = change, layer or torch.nn.Identity()

    @property
    def loss_function(self):
        return getattr(self, "_loss_function", self.own_loss)

    @loss_function.setter
    def loss_function(self, function):
        self._loss_function = function

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids, mask=None, labels=None, return_dict=True, **given):
        logits = self.change(self.head(self.layer(self.embedding(ids))))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=CLASSES, **given)
        return Output(loss, logits) if return_dict else (loss, logits)


class Masked(Model):
    own_loss = staticmethod(functools.partial(token_loss, shift=0))


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank adapter, as peft wraps it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.Linear(base.in_features, 3, bias=False)
        self.lora_B = torch.nn.Linear(3, base.out_features, bias=False)

    def forward(self, x):
        found = self.base_layer(x)
        dtype = found.dtype
        found = found + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * 1.7
        return found.to(dtype)


def softcapped(logits):
    return torch.tanh(logits / 3.0) * 3.0


CHANGES = {
    "none": lambda logits: logits,
    "multiplied": lambda logits: logits * 0.25,
    "divided": lambda logits: logits.float() / 3,
    "softcap": softcapped,
    "method": lambda logits: (2 * (0.5 * logits).tanh()).contiguous(),
    "all": lambda logits: softcapped(logits * 0.5).float() / 0.7,
}
COMPUTED = {  # what has to see logits
    "negative": lambda logits: logits * -1.5,
    "tensor": lambda logits: logits * torch.full((), 0.3),
    "sliced": lambda logits: logits[..., :CLASSES] + 1,
    "subtracted": lambda logits: logits - logits.mean(-1, keepdim=True),
    "twice": lambda logits: softcapped(softcapped(logits)),
    "looked at": lambda logits: (logits.max().item(), logits)[1],
    "listed": lambda logits: torch.cat([logits[:1], logits[1:]]),
    "clamped in place": lambda logits: (logits.clamp_(-0.1, 0.1), logits * 2)[1],
}


def batch():
    torch.manual_seed(0)
    ids = torch.randint(0, CLASSES, (2, 6))
    labels = ids.clone()
    labels[0, :3] = -100
    return ids, labels


def gradients(model, loss):
    return torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad])


def compare(model, needs_logits=False, wrap=lambda model: model, **given):
    """A step of the model with its own loss and with opgrad's."""
    ids, labels = batch()
    expected = model(ids, labels=labels, **given)
    wanted = gradients(model, expected.loss)
    assert opgrad.torch.patch(model) is model
    found = wrap(model)(ids, labels=labels, **given)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(gradients(model, found.loss), wanted)
    assert needs_logits or found.logits is None


@pytest.mark.parametrize("kind", [Model, Masked])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_part_of_the_loss(change, kind):
    compare(kind(CHANGES[change]))
    compare(kind(CHANGES[change]), num_items_in_batch=torch.tensor(20))


@pytest.mark.parametrize("change", COMPUTED)
def test_what_needs_logits(change):
    compare(Model(COMPUTED[change]), needs_logits=True)


def test_a_causal_model():
    model, (ids, labels) = Model(), batch()
    signature = inspect.signature(model.forward)
    expected = model(ids, labels=labels)
    opgrad.torch.patch(model)
    assert inspect.signature(model.forward) == signature
    assert model.forward.__self__ is model
    for found in (model(ids, None, labels), model.forward(ids, labels=labels)):
        torch.testing.assert_close(found.loss, expected.loss)
        assert found.logits is None
    moved = functional.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(ids, labels=labels, shift_labels=moved).loss, expected.loss)
    loss, logits = model(ids, labels=labels, return_dict=False)
    torch.testing.assert_close((loss, logits), (expected.loss, expected.logits))
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(model(ids).logits, expected.logits)
    torch.testing.assert_close(model.eval()(ids, labels=labels).logits, expected.logits)
    opgrad.torch.unpatch(model)
    assert model.train()(ids, labels=labels).logits is not None
    assert not {"forward", "_loss_function", "_opgrad_patch"} & set(model.__dict__)
    assert not model.head._forward_pre_hooks
    stored = opgrad.torch.patch(model, linear=False)(ids, labels=labels)
    torch.testing.assert_close((stored.loss, stored.logits), (expected.loss, expected.logits))


def test_half_precision_gives_a_float32_loss():
    model, (ids, labels) = Model().bfloat16(), batch()
    expected = model(ids, labels=labels).loss
    for linear in (True, False):
        found = opgrad.torch.patch(model, linear=linear)(ids, labels=labels).loss
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", torch.bfloat16):
        expected = opgrad.torch.unpatch(model.float())(ids, labels=labels)
        found = opgrad.torch.patch(model)(ids, labels=labels)
        torch.testing.assert_close(found.loss, expected.loss)
        assert model(ids, labels=labels, return_dict=False)[1].dtype == torch.bfloat16


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_options(softcap):
    """They apply to what the model gives to its loss."""
    model, (ids, labels) = Model(lambda logits: logits / 3), batch()
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    options = {"label_smoothing": 0.1, "lse_square_scale": 0.05, "temperature": 1.5, "softcap": softcap}
    expected = opgrad.torch.cross_entropy(logits, labels[:, 1:].flatten(), **options)
    for linear in (True, False):
        found = opgrad.torch.patch(model, linear=linear, **options)(ids, labels=labels).loss
        torch.testing.assert_close(found, expected)
    model.eval()
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)


@pytest.mark.parametrize("where", ["forward", "pre", "backward", "global"])
def test_hooks_see_logits(where):
    model, (ids, labels), seen = opgrad.torch.patch(Model()), batch(), []
    expected = opgrad.torch.unpatch(copy.deepcopy(model))(ids, labels=labels)
    handle = {
        "forward": lambda: model.head.register_forward_hook(lambda module, x, y: seen.append(y)),
        "pre": lambda: model.head.register_forward_pre_hook(lambda module, x: seen.append(x[0])),
        "backward": lambda: model.head.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0])),
        "global": lambda: torch.nn.modules.module.register_module_forward_hook(lambda m, x, y: seen.append(y)),
    }[where]()
    try:
        found = model(ids, labels=labels)
        found.loss.backward()
    finally:
        handle.remove()
    torch.testing.assert_close((found.loss, found.logits), (expected.loss, expected.logits))
    assert seen
    assert not any(isinstance(each, Deferred) for each in seen)
    if where == "forward":
        torch.testing.assert_close(seen[0], expected.logits)
    assert model(ids, labels=labels).logits is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters(dtype):
    """An adapted output layer, and a model that peft wraps and calls by its `forward`."""
    model, (ids, labels) = Model().to(dtype), batch()
    model.head = Adapted(model.head)
    if dtype == torch.float32:
        compare(model)
    model.head.base_layer.weight.requires_grad_(False)
    expected = opgrad.torch.unpatch(model)(ids, labels=labels)

    class Peft(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def get_base_model(self):
            return self.model

        def forward(self, *args, **given):
            return self.model.forward(*args, **given)

    wrapped = Peft()
    assert opgrad.torch.patch(wrapped) is wrapped
    found = wrapped(ids, labels=labels)
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss, rtol=0 if dtype == torch.float32 else 1e-2, atol=1e-6)
    _, grads = gradients(model, found.loss), [each.grad for each in model.parameters()]
    assert grads == [None] * len(grads)
    assert opgrad.torch.unpatch(wrapped)(ids, labels=labels).logits is not None


def test_forward_that_others_wrap():
    """As accelerate wraps it, below and above ours, and takes it away again."""
    model, (ids, labels) = Model(), batch()
    expected = model(ids, labels=labels).loss

    def prepared(model):
        inner = model.forward.__func__

        @functools.wraps(inner)
        def forward(self, *args, **given):
            with torch.autocast("cpu", torch.bfloat16, enabled=False):
                return inner(self, *args, **given)

        model.forward = types.MethodType(forward, model)
        return model

    for patched in (prepared(opgrad.torch.patch(Model())), opgrad.torch.patch(prepared(Model()))):
        patched.load_state_dict(model.state_dict())
        found = patched(ids, labels=labels)
        torch.testing.assert_close(found.loss, expected)
        assert found.logits is None
        opgrad.torch.unpatch(patched)
        torch.testing.assert_close(patched(ids, labels=labels).loss, expected)
        assert patched(ids, labels=labels).logits is not None
    plain = Model()
    plain.load_state_dict(model.state_dict())
    own = plain.forward
    plain.forward = lambda *args, **given: own(*args, **given)
    assert opgrad.torch.patch(plain)(ids, labels=labels).logits is None


def test_copies_and_threads():
    model, (ids, labels) = opgrad.torch.patch(Model()), batch()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.head.weight.zero_()
    assert other(ids, labels=labels).loss.item() == pytest.approx(torch.tensor(float(CLASSES)).log().item())
    inputs = [(ids + i) % CLASSES for i in range(4)]
    expected, found = [model(each, labels=labels).loss.item() for each in inputs], {}

    def run(place):
        found[place] = [model(inputs[place], labels=labels).loss.item() for _ in range(50)]

    call_at_once(len(inputs), run)
    assert [found[place] for place in range(len(inputs))] == [[each] * 50 for each in expected]


@pytest.mark.parametrize("change", ["none", "all"])
def test_compiled(change):
    torch.compiler.reset()
    compare(Model(CHANGES[change]), wrap=lambda model: torch.compile(model, backend="aot_eager"))


def test_refusals():
    refused(TypeError, "model is Linear, expected a causal language model", opgrad.torch.patch, torch.nn.Linear(2, 2))
    refused(TypeError, "margin is no option, expected label_smoothing", opgrad.torch.patch, Model(), margin=1.0)
    refused(ValueError, "softcap is 0, expected a finite number above 0", opgrad.torch.patch, Model(), softcap=0)
    model = Model()
    model.loss_function = lambda logits, labels, vocab_size, **given: token_loss(logits, labels, vocab_size) * 2
    refused(TypeError, "the loss of Model is another than cross-entropy of tokens", opgrad.torch.patch, model)
    assert "forward" not in model.__dict__
    model = Model()
    model.head = torch.nn.Identity()
    refused(TypeError, r"the output layer is Identity, expected torch\.nn\.Linear", opgrad.torch.patch, model)
    opgrad.torch.patch(model, linear=False)
    ids, labels = batch()
    freed = opgrad.torch.patch(Model(lambda logits: (freed.head.weight.untyped_storage().resize_(0), logits)[1]))
    refused(RuntimeError, "weights were given back before the loss", freed, ids, labels=labels)


def test_a_model_that_computes_its_loss_by_itself():
    class Own(Model):
        def forward(self, ids, labels=None):
            logits = self.head(self.embedding(ids))
            return Output(functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), logits)

    model, (ids, labels) = Own(), batch()
    expected = model(ids, labels=labels)
    opgrad.torch.patch(model)
    with pytest.warns(UserWarning, match="Own has computed its loss by itself"):
        found = model(ids, labels=labels)
    torch.testing.assert_close((found.loss, found.logits), (expected.loss, expected.logits))


SIZES = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def causal_models():
    try:
        import transformers
    except ImportError:
        return []
    several = [
        each if isinstance(each, tuple) else (each,) for each in transformers.MODEL_FOR_CAUSAL_LM_MAPPING.values()
    ]
    return sorted({kind for kinds in several for kind in kinds}, key=lambda kind: kind.__name__)


def step(model):
    """The loss of a model and its gradients by parameters; None for those that it does not read."""
    torch.manual_seed(0)
    ids = torch.randint(3, small_causal_models.CLASSES, (2, small_causal_models.LENGTH))
    loss = model(input_ids=ids, labels=ids).loss
    return loss, torch.autograd.grad(
        loss, [each for each in model.parameters() if each.requires_grad], allow_unused=True
    )


def small_model_with_step(kind):
    for model in small_causal_models.small_models(kind):
        with contextlib.suppress(Exception):
            return model, step(model)
    pytest.skip(f"no small form of {kind.__name__} is known")
    return None


@pytest.mark.filterwarnings("ignore")  # of these libraries among themselves
@pytest.mark.parametrize("kind", causal_models(), ids=lambda kind: kind.__name__)
def test_every_causal_model_of_transformers(kind):
    """Loss and gradients are what they were, in a small form; what has no small form here is skipped by its name."""
    model, (expected, wanted) = small_model_with_step(kind)
    found, slopes = step(opgrad.torch.patch(model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for mine, other in zip(slopes, wanted, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or (mine - other).norm() <= 1e-3 * other.norm() + 1e-6


def test_most_causal_models_have_a_small_form():
    """Those of a transformers that moves its configurations' names would be skipped one by one."""
    pytest.importorskip("transformers")
    kinds = causal_models()
    made = sum(next(small_causal_models.small_models(kind), None) is not None for kind in kinds[::10])
    assert made >= 0.7 * len(kinds[::10])


@pytest.mark.filterwarnings("ignore")  # of these libraries among themselves
def test_a_masked_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(**SIZES, cls_token_id=1, sep_token_id=2)
    model, ids = transformers.ModernBertForMaskedLM(config).train(), torch.randint(3, 97, (2, 9))
    labels = torch.where(torch.arange(9) < 4, -100, ids)
    expected = model(input_ids=ids, labels=labels)
    wanted = gradients(model, expected.loss)
    found = opgrad.torch.patch(model)(input_ids=ids, labels=labels)
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(gradients(model, found.loss), wanted, rtol=1e-4, atol=1e-6)


def llama(transformers):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()


@pytest.mark.filterwarnings("ignore")  # of these libraries among themselves
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "adapter",
    [{"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
)
def test_adapters_of_peft(adapter, dtype):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, lora_dropout=0.0, **adapter)
    model = peft.get_peft_model(llama(transformers).to(dtype), config).train()
    ids = torch.randint(3, 97, (2, 9))
    expected = model(input_ids=ids, labels=ids).loss
    wanted = gradients(model, expected)
    found = opgrad.torch.patch(model)(input_ids=ids, labels=ids)
    assert found.logits is None
    exact = dtype == torch.float32
    torch.testing.assert_close(found.loss, expected, rtol=1e-5 if exact else 1e-2, atol=0)
    for ours, theirs in zip(gradients(model, found.loss), wanted, strict=True):
        assert (ours - theirs).norm() <= (1e-5 if exact else 0.05) * theirs.norm() + 1e-6


@pytest.mark.filterwarnings("ignore")  # of these libraries among themselves
def test_trainer_of_transformers(tmp_path):
    """Columns that the model does not take are dropped, those that it takes are not, and bfloat16 trains."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ids = torch.randint(3, 97, (9,))
    data = [{"input_ids": ids, "labels": ids, "other": ids}] * 8
    losses = []
    for prepare in (lambda model: model, opgrad.torch.patch):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, bf16=True,
            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(prepare(llama(transformers)), arguments, train_dataset=data)
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


# --- layers -----------------------------------------------------------------------------------------------------------


class TinyRMSNorm(torch.nn.Module):
    """As Llama has it; beside: the weights are those beside one, as Gemma's are; mean: it is no RMS normalization."""

    def __init__(self, beside=0.0, mean=False):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.rand(4) + 0.5), 1e-5
        self.beside, self.mean = beside, mean

    def forward(self, hidden_states):
        x = hidden_states - hidden_states.mean(-1, keepdim=True) if self.mean else hidden_states
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.beside + self.weight) * x


class NewGELU(torch.nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class GatedLayer(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(4, 6, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(6, 4, bias=False), activation

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


REPLACED = {
    "RMS norm": TinyRMSNorm,
    "RMS norm beside one": lambda: TinyRMSNorm(1.0),
    "SwiGLU": lambda: GatedLayer(torch.nn.SiLU()),
    "GEGLU": lambda: GatedLayer(torch.nn.GELU("tanh")),
    "GEGLU by erf": lambda: GatedLayer(torch.nn.GELU()),
    "gelu of several operations": NewGELU,
}
LEFT = {
    "a mean is subtracted": lambda: TinyRMSNorm(mean=True),
    "another activation": lambda: GatedLayer(torch.nn.ReLU()),
    "PyTorch's own gelu": torch.nn.GELU,
    "an own forward": lambda: own_forward(TinyRMSNorm()),
}


def own_forward(module):
    module.forward = types.MethodType(lambda self, x: x * self.weight, module)
    return module


@pytest.mark.parametrize("make", [*REPLACED.values(), *LEFT.values()], ids=[*REPLACED, *LEFT])
def test_layers_are_replaced_by_what_computes_the_same(make):
    torch.manual_seed(1)
    model = Model(layer=make())
    before = model.layer.__dict__.get("forward")
    compare(model)
    assert ("forward" in model.layer.__dict__ and before is None) == (make in REPLACED.values())
    opgrad.torch.unpatch(model)
    assert model.layer.__dict__.get("forward") is before
    opgrad.torch.patch(model, layers=False)
    assert model.layer.__dict__.get("forward") is before


def test_patched_layers_are_copied_and_pickled():
    model = opgrad.torch.patch(Model(torch.nn.Identity(), TinyRMSNorm()))
    x = torch.randn(3, 4)
    expected = model.layer(x)
    assert inspect.signature(model.layer.forward) == inspect.signature(TinyRMSNorm().forward)
    torch.testing.assert_close(model.layer(hidden_states=x), expected)
    twin = copy.deepcopy(model.layer)
    with torch.no_grad():
        twin.weight.mul_(2)
    torch.testing.assert_close(twin(x), 2 * expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model.layer))(x), expected)


class Weightless(TinyRMSNorm):
    """A normalization that has no use for its weight, which is as long as the first input."""

    def __init__(self):
        super().__init__()
        torch.nn.init.ones_(self.weight)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class WeightlessRMSNorm(Weightless):
    pass


def test_other_sizes_than_those_that_were_tried_are_the_modules_own():
    model = opgrad.torch.patch(Model(layer=WeightlessRMSNorm()))
    assert "forward" in model.layer.__dict__
    for size in (4, 6):
        x = torch.randn(3, size)
        torch.testing.assert_close(model.layer(x), WeightlessRMSNorm()(x))


class Interface(dict):
    """A table of implementations, as transformers has it."""

    entries: ClassVar[dict] = {}

    def __init__(self):
        super().__init__(self.entries)

    @classmethod
    def register(cls, name, function):
        cls.entries[name] = function


class Attending(Model):
    """A model with a module that has a configuration, as those that attend have, and calls what the table names."""

    def __init__(self, attention):
        super().__init__(torch.nn.Identity())  # can be pickled
        self.config = types.SimpleNamespace(_attn_implementation="sdpa")
        self.attention = attention
        self.attention.config = self.config


@pytest.fixture
def table(monkeypatch):
    """The table of a library that is loaded, with an own attention that returns what it was given."""
    library = types.ModuleType("transformers")
    library.AttentionInterface = type("Attention", (Interface,), {"entries": {"sdpa": lambda *given, **named: named}})
    monkeypatch.setitem(sys.modules, "transformers", library)
    return library.AttentionInterface


def test_attention_is_replaced_in_modules_of_patched_models(table):
    """The configuration stays as it is: others share it, and models compare it."""
    model, other = Attending(torch.nn.Identity()), Attending(torch.nn.Identity())
    opgrad.torch.patch(model)
    assert model.config._attn_implementation == "sdpa"
    assert list(table.entries) == ["sdpa"]
    attend = table()["sdpa"]
    q, k, v = torch.randn(2, 4, 6, 8), *torch.randn(2, 2, 2, 6, 8)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    options = {"position_ids": torch.arange(6), "softcap": None, "output_attentions": False, "sliding_window": 3}
    for given, expected in ((None, {"is_causal": True}), (mask, {"attn_mask": mask})):
        for more in ({}, {"is_causal": True}):
            found, _ = attend(model.attention, q, k, v, given, scaling=0.3, **options, **more)
            exact = functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True, **expected)
            torch.testing.assert_close(found, exact.transpose(1, 2))
    found, _ = attend(model.attention, q[:, :, -1:], k, v, None, is_causal=True)
    exact = functional.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True)
    torch.testing.assert_close(found, exact.transpose(1, 2))
    assert attend(other.attention, q, k, v, None, scaling=0.3) == {"scaling": 0.3}
    assert isinstance(attend(copy.deepcopy(model).attention, q, k, v, None)[0], torch.Tensor)
    opgrad.torch.patch(other)
    assert table()["sdpa"] is attend
    opgrad.torch.unpatch(model)
    assert attend(model.attention, q, k, v, None, scaling=0.3) == {"scaling": 0.3}
    assert model.attention.__dict__.keys() == Attending(torch.nn.Identity()).attention.__dict__.keys()


@pytest.mark.parametrize(
    "more",
    [
        *({"indices": torch.arange(3)}, {"position_bias": torch.zeros(1)}, {"softcap": 3.0}, {"output_attentions": 1}),
        *({"dropout": 0.0, "mask": torch.zeros(3, 3)}, {"dropout": 0.0, "size": 264}),
    ],
    ids=str,
)
def test_calls_that_ours_does_not_take_are_the_librarys_own(table, more):
    """Those with arguments that are not known, a mask of too few axes, or heads that are too large."""
    model, others = opgrad.torch.patch(Attending(torch.nn.Identity())), dict(more)
    q, mask = torch.randn(2, 4, 3, others.pop("size", 8)), others.pop("mask", None)
    assert table()["sdpa"](model.attention, q, q, q, mask, **others) == others


def test_a_pickled_model_puts_attention_into_the_table_of_its_process(table):
    text = pickle.dumps(opgrad.torch.patch(Attending(torch.nn.Identity())))
    own = table.entries["sdpa"] = lambda *given, **named: named  # as in a process that has not patched
    found = pickle.loads(text)
    assert found.config._attn_implementation == "sdpa"
    q = torch.randn(2, 4, 6, 8)
    assert table.entries["sdpa"] is not own
    assert isinstance(table()["sdpa"](found.attention, q, q, q, None)[0], torch.Tensor)
    ids, labels = batch()
    assert found(ids, labels=labels).loss is not None
