"""What flax's examples train, in our own words and small: linen and nnx."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from wild.suite import Entry, draw, images, text

# Linen


class Cnn(nn.Module):
    """The one of the MNIST example."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for features in (4, 8):
            x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(4)(nn.relu(nn.Dense(16)(x.reshape(len(x), -1))))


class Block(nn.Module):
    """A residual block of the ImageNet example."""

    features: int
    norm: Any
    strides: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        strides = (self.strides, self.strides)
        y = nn.relu(self.norm()(nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)))
        y = self.norm(scale_init=nn.initializers.zeros)(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        return nn.relu(y + self.norm()(nn.Conv(self.features, (1, 1), strides, use_bias=False)(x)))


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        def norm(**options: Any) -> Any:
            return nn.BatchNorm(use_running_average=not train, momentum=0.9, **options)

        x = nn.max_pool(nn.relu(norm()(nn.Conv(4, (3, 3), use_bias=False)(x))), (3, 3), (2, 2), "SAME")
        x = Block(8, norm, 2)(Block(4, norm, 1)(x))
        return nn.Dense(4)(x.mean((1, 2)))


class Vae(nn.Module):
    """An image through a few numbers that are drawn, and back: (scores of the pixels, means, log variances)."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = nn.relu(nn.Dense(16)(x))
        mean, logvar = nn.Dense(3)(hidden), nn.Dense(3)(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(self.make_rng("latent"), mean.shape)
        return nn.Dense(x.shape[1])(nn.relu(nn.Dense(16)(z))), mean, logvar


def evidence(output: Any, x: Any) -> Any:
    """The VAE's own loss: for every example, how surprising its pixels are, and how far its numbers are from noise."""
    scores, mean, logvar = output
    surprise = optax.sigmoid_binary_cross_entropy(scores, x).sum(1)
    return surprise - 0.5 * (1 + logvar - mean**2 - jnp.exp(logvar)).sum(1)


class LanguageModel(nn.Module):
    """A transformer that tells the next token, as in the example of LM1B; the words are also the scores."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        words = nn.Embed(50, 16)
        places = self.param("places", nn.initializers.normal(0.02), (x.shape[1], 16))
        h = nn.Dropout(0.1, deterministic=not train)(words(x) + places)
        attend = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=not train)
        h = h + attend(nn.LayerNorm()(h), mask=nn.make_causal_mask(x))
        h = h + nn.Dropout(0.1, deterministic=not train)(nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(h)))))
        return words.attend(nn.LayerNorm()(h))


class Seq2Seq(nn.Module):
    """An LSTM reads a question, another one goes on from there and is told each letter of the answer before the next."""

    asked: int = 4

    @nn.compact
    def __call__(self, x: Any) -> Any:
        letters = jax.nn.one_hot(x, 50)
        carry, _ = nn.RNN(nn.OptimizedLSTMCell(16), return_carry=True)(letters[:, : self.asked])
        return nn.Dense(50)(nn.RNN(nn.OptimizedLSTMCell(16))(letters[:, self.asked :], initial_carry=carry))


class Sentiment(nn.Module):
    """Words in both directions, as in the example of SST-2: biLSTM, attention over its steps, dropout."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        words = nn.Dropout(0.2, deterministic=not train)(nn.Embed(50, 8)(x))
        states = nn.Bidirectional(nn.RNN(nn.LSTMCell(8)), nn.RNN(nn.LSTMCell(8)))(words)
        weights = nn.softmax(nn.Dense(1, use_bias=False)(jnp.tanh(nn.Dense(8)(states))), axis=1)
        return nn.Dense(4)((weights * states).sum(1))


class Scanned(nn.Module):
    """Layers of one kind, as one scan with weights that are stacked, each computed again in the backward pass."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, h: Any, _: Any) -> Any:
                return h + nn.tanh(nn.Dense(16)(nn.LayerNorm()(h))), None

        stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(4)(stack()(nn.Dense(16)(x.reshape(len(x), -1)), None)[0])


# nnx


class NnxCnn(nnx.Module):
    """nnx's own MNIST example: batch norm and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.25, rngs=rngs)
        self.hidden, self.last = nnx.Linear(7 * 7 * 8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.avg_pool(nnx.relu(self.norm(self.drop(self.first(x)))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.drop(self.second(x))), (2, 2), (2, 2)).reshape(len(x), -1)
        return self.last(nnx.relu(self.drop(self.hidden(x))))


class NnxVae(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encode, self.mean, self.logvar = (nnx.Linear(*size, rngs=rngs) for size in ((64, 16), (16, 3), (16, 3)))
        self.decode, self.pixels = nnx.Linear(3, 16, rngs=rngs), nnx.Linear(16, 64, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x: Any) -> Any:
        hidden = nnx.relu(self.encode(x))
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(self.rngs.latent(), mean.shape)
        return self.pixels(nnx.relu(self.decode(z))), mean, logvar


class NnxLanguageModel(nnx.Module):
    """As Gemma: RMS norms, a gated layer, and scores from the words."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words, self.drop = nnx.Embed(50, 16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(2, 16, dropout_rate=0.1, decode=False, rngs=rngs)
        self.before, self.between, self.after = (nnx.RMSNorm(16, rngs=rngs) for _ in range(3))
        self.gate, self.up, self.down = (nnx.Linear(*size, rngs=rngs) for size in ((16, 32), (16, 32), (32, 16)))

    def __call__(self, x: Any) -> Any:
        h = self.drop(self.words(x) * 4)
        h = h + self.attend(self.before(h), mask=nnx.make_causal_mask(x))
        y = self.between(h)
        return self.words.attend(self.after(h + self.drop(self.down(nnx.gelu(self.gate(y)) * self.up(y)))))


class NnxSeq2Seq(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.read = nnx.RNN(nnx.OptimizedLSTMCell(50, 16, rngs=rngs), return_carry=True)
        self.write, self.scores = nnx.RNN(nnx.GRUCell(50, 16, rngs=rngs)), nnx.Linear(16, 50, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        letters = jax.nn.one_hot(x, 50)
        (_, carry), _ = self.read(letters[:, :4])
        return self.scores(self.write(letters[:, 4:], initial_carry=carry))


def of_tokens(output: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(output, y).mean(1)


def entry(make: Callable[[], Any], data: Any, loss: Any = None, **more: Any) -> Entry:
    return Entry(make, data, {"loss": loss}, **more)


def seeded(model: Any) -> Callable[[], Any]:
    return lambda: model(nnx.Rngs(0))


PIXELS = (draw().random((20, 64)) < 0.3).astype("float32")
WORDS = text(9)
ANSWERS = WORDS[0], WORDS[1][:, 4:]
MODELS = {
    "mnist": entry(Cnn, images(28, 1, last=True)),
    "imagenet, resnet": entry(ResNet, images(16, last=True)),
    "vae": entry(Vae, (PIXELS, PIXELS), evidence),
    "lm1b, transformer": entry(LanguageModel, WORDS, of_tokens),
    "seq2seq": entry(Seq2Seq, ANSWERS, of_tokens),
    "sst2, both directions": entry(Sentiment, (WORDS[0], images(1)[1])),
    "scanned layers": entry(Scanned, images(4)),
    "nnx, mnist": entry(seeded(NnxCnn), images(28, 1, last=True)),
    "nnx, vae": entry(seeded(NnxVae), (PIXELS, PIXELS), evidence, quick=True),
    "nnx, gemma": entry(seeded(NnxLanguageModel), WORDS, of_tokens),
    "nnx, seq2seq": entry(seeded(NnxSeq2Seq), ANSWERS, of_tokens),
}
