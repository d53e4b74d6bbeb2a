"""Small models of the architectures that people export from PyTorch, with arguments for them."""

import io
import warnings

import onnx
import torch
from torch import nn
from torch.nn import functional


def tokens(vocabulary, *shape):
    """Random tokens."""
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(3))


def image(*shape):
    """A random image."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


class Perceptron(nn.Sequential):
    """Layers with several activations."""

    example = (image(6, 5),)

    def __init__(self):
        super().__init__(
            *(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.SiLU(), nn.Dropout(0.0), nn.Linear(8, 6), nn.Tanh()),
            *(nn.Linear(6, 6), nn.ELU(), nn.Linear(6, 4), nn.Softplus(), nn.Linear(4, 3)),
        )


def normalized(inputs, outputs, kernel=3, stride=1, groups=1):
    """A convolution with batch normalization."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class Convolutional(nn.Module):
    """Convolutions with batch normalization and both kinds of pooling."""

    example = (image(4, 2, 12, 12),)

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = normalized(2, 4), normalized(4, 6, 5), nn.Linear(24, 3)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.first(x)), 2)
        x = functional.avg_pool2d(functional.leaky_relu(self.second(x)), 3, stride=2, padding=1)
        return self.last(functional.adaptive_avg_pool2d(x[..., :2, :2], 2).flatten(1))


class Inverted(nn.Module):
    """A block of MobileNetV2."""

    def __init__(self, inputs, outputs, stride, expansion):
        super().__init__()
        inner, self.adds = inputs * expansion, stride == 1 and inputs == outputs
        self.block = nn.Sequential(
            *(normalized(inputs, inner, 1), nn.ReLU6(), normalized(inner, inner, 3, stride, inner), nn.ReLU6()),
            normalized(inner, outputs, 1),
        )

    def forward(self, x):
        return x + self.block(x) if self.adds else self.block(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 with few blocks."""

    example = (image(2, 3, 24, 24),)

    def __init__(self):
        super().__init__()
        blocks = [(4, 4, 1, 1), (4, 6, 2, 3), (6, 6, 1, 3), (6, 8, 2, 3), (8, 8, 1, 3)]
        self.features = nn.Sequential(normalized(3, 4, 3, 2), nn.ReLU6(), *(Inverted(*each) for each in blocks))
        self.last = nn.Sequential(normalized(8, 12, 1), nn.ReLU6())
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(12, 4))

    def forward(self, x):
        return self.classifier(self.last(self.features(x)).mean([2, 3]))


class UNet(nn.Module):
    """A U-Net of two levels; up: what doubles the size."""

    example = (image(2, 1, 8, 12),)
    bilinear = False

    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = normalized(1, 4), normalized(4, 6), normalized(8, 4)
        self.grow = nn.Conv2d(6, 4, 1) if self.bilinear else nn.ConvTranspose2d(6, 4, 2, 2)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        side = functional.relu(self.down(x))
        deep = functional.relu(self.middle(functional.max_pool2d(side, 2)))
        if self.bilinear:
            deep = functional.interpolate(deep, size=side.shape[-2:], mode="bilinear", align_corners=False)
        return self.last(functional.relu(self.up(torch.cat([side, self.grow(deep)], 1))))


class BilinearUNet(UNet):
    """The one that grows by interpolation."""

    bilinear = True


class Attention(nn.Module):
    """Attention of several heads; fused: as one function of PyTorch; mask: what is added to the scores."""

    def __init__(self, width, heads, fused):
        super().__init__()
        self.fused = fused
        self.heads, self.packed, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask=None):
        n, length, width = x.shape
        parts = self.packed(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, mask)
        else:
            scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
            y = torch.softmax(scores if mask is None else scores + mask, -1) @ v
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Layer(nn.Module):
    """A layer of a transformer; first: whether it normalizes before."""

    def __init__(self, width, heads, first=True, activation=functional.gelu, fused=False):
        super().__init__()
        self.attention, self.first, self.activation = Attention(width, heads, fused), first, activation
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask=None):
        if self.first:
            x = x + self.attention(self.norms[0](x), mask)
            return x + self.narrow(self.activation(self.wide(self.norms[1](x))))
        x = self.norms[0](x + self.attention(x, mask))
        return self.norms[1](x + self.narrow(self.activation(self.wide(x))))


class ViT(nn.Module):
    """ViT-tiny with two layers."""

    example = (image(2, 3, 8, 8),)

    def __init__(self):
        super().__init__()
        self.patches, self.layers = nn.Conv2d(3, 8, 4, 4), nn.ModuleList([Layer(8, 2, fused=True), Layer(8, 2)])
        self.first, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Bert(nn.Module):
    """BERT-tiny with a mask of padding."""

    example = (tokens(11, 2, 6), tokens(2, 2, 6), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]))

    def __init__(self):
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(11, 8), nn.Embedding(7, 8), nn.Embedding(2, 8)
        self.norm, self.layer = nn.LayerNorm(8), Layer(8, 2, False)
        self.pooler, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, words, kinds, keys):
        places = torch.arange(words.shape[1], device=words.device)
        x = self.norm(self.words(words) + self.places(places) + self.kinds(kinds))
        x = self.layer(x, (1.0 - keys[:, None, None, :].float()) * -10000.0)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


def gelu_of_gpt2(x):
    """Gelu by tanh, as GPT-2 writes it."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class GPT2(nn.Module):
    """GPT-2-tiny, whose first and last layer share their weights."""

    example = (tokens(13, 2, 5),)

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(13, 8), nn.Embedding(6, 8)
        self.layer = Layer(8, 2, activation=gelu_of_gpt2)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 13, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        places = torch.arange(words.shape[1])
        x = self.words(words) + self.places(places)
        mask = torch.zeros(()).masked_fill(places[:, None] < places, float("-inf"))
        return self.head(self.norm(self.layer(x, mask)))


class Text(nn.Module):
    """A recurrent text model of two layers and both directions."""

    example = (tokens(9, 3, 5),)
    kind = nn.LSTM

    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(9, 4), self.kind(4, 3, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(6, 2)

    def forward(self, words):
        return self.head(self.layers(self.words(words))[0].mean(1))


class GatedText(Text):
    """The one with GRU."""

    kind = nn.GRU


class Recommender(nn.Module):
    """A DLRM: tables, two perceptrons, and the products of all pairs of features."""

    example = (image(4, 3), tokens(5, 4, 3))

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(5, 4) for _ in range(3)])
        self.bottom = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 1), nn.Sigmoid())

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        features = torch.stack([x, *(table(sparse[:, place]) for place, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1))


MODELS = (
    *(Perceptron, Convolutional, MobileNetV2, UNet, BilinearUNet),
    *(ViT, Bert, GPT2, Text, GatedText, Recommender),
)


def exported(whole, given, opset, *, dynamo=False, axes=()):
    """The model as PyTorch writes it; axes: of all arguments, those whose sizes it leaves open."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            whole.eval()  # in which parameters keep their names only without optimization
            program = torch.onnx.export(whole, given, dynamo=True, opset_version=opset, verbose=False, optimize=False)
            return program.model_proto
        names = [f"in{place}" for place in range(len(given))]
        sizes = [{axis: f"size{axis}" for axis in axes if axis < each.dim()} for each in given]
        torch.onnx.export(
            whole, given, file, dynamo=False, opset_version=opset, training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False, input_names=names, output_names=["loss"],
            dynamic_axes=dict(zip(names, sizes, strict=True)),
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())
