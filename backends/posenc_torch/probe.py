"""A causal model of transformers in a folder, as ``posenc probe`` measures it."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posenc import presets
from posenc.backend import LayerPlan, PositionScheme
from posenc.probe import CELLS, byte_lengths, losses_of, rope_in
from posenc.schemes import RoPE
from posenc_torch import hf
from posenc_torch.hf.layer import LAYER

Array = np.ndarray[Any, Any]
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
    "spiece.model", "tekken.json",
)  # fmt: skip
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SHARE = 0.4  # of the free memory that a batch may take
_MOST = 1 << 15  # tokens in a batch; more are no faster
_TRIED = 12  # tokens on which the head alone is compared with the whole model
_CLOSE, _CLOSE_16 = 1e-4, 0.02  # of the largest logit, in float32 and in bfloat16


class Model:
    """A causal language model of transformers, with its tokenizer if the folder has one.

    Parameters
    ----------
    folder
        With ``config.json`` and weights; no code of the folder is run.
    device
        ``"auto"``, ``"cpu"``, ``"cuda"`` or another of PyTorch.
    dtype
        ``"auto"`` for bfloat16 on a GPU and float32 elsewhere, ``"float32"`` or ``"bfloat16"``.
    batch_size
        Windows at once; None for as many as the free memory has room for.

    Raises
    ------
    FileNotFoundError, ValueError
        There is no folder or configuration, or the model is no causal language model.
    """

    def __init__(
        self, folder: str, device: str = "auto", dtype: str = "auto", batch_size: int | None = None
    ) -> None:
        import transformers

        self.backend = "torch"
        self.folder = Path(folder)
        self.config = _config(self.folder)
        name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.device = _device(name)
        if dtype == "auto":
            dtype = "float32" if self.device.type == "cpu" else "bfloat16"
        self.dtype, self._batch_size = dtype, batch_size
        self.tokenizer: Any = None
        if any((self.folder / each).is_file() for each in _TOKENIZERS):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(
                str(self.folder), local_files_only=True
            )
        self.model: Any = None
        self.notes: list[str] = []
        self._chunked = True
        self._used: Any = None  # the scheme instead of the model's own

    # What is known without the weights.

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return int(self._text.vocab_size)

    @property
    def _text(self) -> Any:
        return self.config.get_text_config()

    @property
    def start(self) -> int | None:
        """The token that the tokenizer puts before a text, or None."""
        if self.tokenizer is None or self.tokenizer.bos_token_id is None:
            return None
        first = self.tokenizer("a")["input_ids"][:1]
        bos = int(self.tokenizer.bos_token_id)
        return bos if first == [bos] else None

    @property
    def end(self) -> int | None:
        """The token that ends a text, or None."""
        found = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return None if found is None else int(found)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text alone."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return found

    def encode(self, text: str) -> tuple[Array, Array | None]:
        """The tokens of a text, and how many bytes each covers; None from a slow tokenizer."""
        fast = bool(getattr(self.tokenizer, "is_fast", False))
        found = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False
        )
        ids = np.asarray(found["input_ids"], dtype=np.int64)
        if not fast:
            return ids, None
        ends = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 1]
        return ids, byte_lengths(text, ends)

    def sizes(self) -> dict[str, int]:
        """The sizes that schemes depend on, by the names that makers know, and ``layers``."""
        config = self._text
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
        found = {
            "layers": int(config.num_hidden_layers), "num_heads": heads, "head_dim": head_dim,
            "dim": hidden, "hidden_dim": hidden,
        }  # fmt: skip
        trained = getattr(config, "max_position_embeddings", None)
        return found if trained is None else {**found, "train_len": int(trained)}

    def ropes(self) -> list[RoPE | None]:
        """The RoPE of each layer, or None; none at all if the configuration is not known."""
        try:
            plan = presets.from_hf_config(self.config.to_dict())
        except (TypeError, ValueError, NotImplementedError):
            return []
        return [rope_in(scheme) for scheme in plan.schemes]

    def digest(self) -> str:
        """A digest of all files of the folder that say what the model computes."""
        total = hashlib.sha256()
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and path.suffix in (
                ".json",
                ".safetensors",
                ".bin",
                ".model",
                ".txt",
            ):
                with path.open("rb") as file:
                    own = hashlib.file_digest(file, "sha256").hexdigest()
                total.update(f"{path.name}\0{own}\0".encode())
        return total.hexdigest()

    def facts(self) -> dict[str, Any]:
        """What else the numbers depend on."""
        import transformers

        return {
            "model": self.digest(), "dtype": self.dtype, "device": self.device.type,
            "torch": torch.__version__, "transformers": transformers.__version__,
        }  # fmt: skip

    @property
    def device_name(self) -> str:
        """What the device calls itself."""
        cuda = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if cuda else str(self.device)

    # With the weights.

    def load(self) -> None:
        """Read the weights, and find out whether the head can be computed alone."""
        import transformers

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(self.folder), config=self.config, dtype=_DTYPES[self.dtype], local_files_only=True
        )
        self.model = model.eval().to(self.device)
        with torch.no_grad():
            _check_causal(self.model, self._tried())
        self._chunked = self._head_is_alone()
        if not self._chunked:
            self.notes.append(
                "All logits of a batch are in memory at once: the head of this model could not be "
                "computed for some positions alone."
            )

    def use(self, scheme: PositionScheme | Sequence[PositionScheme] | LayerPlan | None) -> Model:
        """Give the model another scheme, or its own code and positions back for None."""
        if scheme is not self._used:
            hf.remove(self.model)  # so that no row has the learned arrays of another
            self._used = None
            if scheme is not None:
                hf.apply(self.model, scheme)
                self.model.eval()
            self._used = scheme
        return self

    def untrained(self) -> list[str]:
        """Learned arrays of a scheme that the folder does not have, which have first values."""
        learned = getattr(self.model, "posenc", None)
        from posenc_torch.hf.learned import saved_arrays

        if learned is None or saved_arrays(self.model) is not None:
            return []
        return [name for name, _ in learned.named_parameters()]

    def answers(self, tokens: Array, labels: Array) -> tuple[Array, Array]:
        """Losses in nats of ``labels (N, T)``, and whether the likeliest token is the label.

        ``ValueError`` for windows that are longer than a table of positions.
        """
        try:
            return self._answers(tokens, labels)
        except IndexError as error:
            trained = self.sizes().get("train_len")
            raise ValueError(
                f"eval_lens: this model takes no windows of {tokens.shape[1]} tokens; its "
                f"max_position_embeddings is {trained} ({error})"
            ) from error

    @torch.no_grad()
    def _answers(self, tokens: Array, labels: Array) -> tuple[Array, Array]:
        ids = torch.as_tensor(tokens, device=self.device)
        if not self._chunked:
            return losses_of(self._logits(ids), labels)
        outputs = self._base(input_ids=ids, use_cache=False, return_dict=True)
        many = max(1, CELLS // (ids.shape[0] * self.vocabulary))
        found = []
        for first in range(0, ids.shape[1], many):
            cut = slice(first, first + many)
            found.append(losses_of(self._head(outputs, ids, cut), labels[:, cut]))
        loss, right = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
        return loss, right

    @torch.no_grad()
    def distances(self, tokens: Array) -> Array:
        """Mean distances of attention ``(layers, heads)``, of queries in the second half.

        The output of attention is linear in its values. So values that are positions, and ones,
        give ``sum_k a(q, k) k`` and ``sum_k a(q, k)`` without any weight.

        Raises
        ------
        NotImplementedError
            ``posenc_torch.hf`` does not serve the model.
        """
        own = not any(hasattr(module, LAYER) for module in self.model.modules())
        if own:
            try:
                hf.apply(self.model)
            except (TypeError, ValueError) as error:
                raise NotImplementedError(f"posenc_torch.hf: {error}") from error
        try:
            modules = [m for m in self.model.modules() if hasattr(m, LAYER)]
            found: dict[int, Tensor] = {}
            layers = [getattr(module, LAYER) for module in modules]
            for index, layer in enumerate(layers):
                layer.attend = functools.partial(_measured, layer, layer.attend, found, index)
            try:
                ids = torch.as_tensor(tokens, device=self.device)
                self._base(input_ids=ids, use_cache=False, return_dict=True)
            finally:
                for layer in layers:
                    del layer.attend
        finally:
            if own:
                hf.remove(self.model)
        return torch.stack([found[index] for index in sorted(found)]).cpu().numpy()

    def batch_size(self, length: int) -> int:
        """Windows at once: as given, or by free memory and an estimate of bytes per token."""
        if self._batch_size is not None:
            return self._batch_size
        room = int(_SHARE * _free_memory(self.device) / self.bytes_per_token() / length)
        return max(1, min(_MOST // length, room))

    def bytes_per_token(self) -> int:
        """About what a layer holds of a token at once; logits are computed in parts."""
        sizes, config = self.sizes(), self._text
        inner = getattr(config, "intermediate_size", None) or 4 * sizes["hidden_dim"]
        inner = max(inner) if isinstance(inner, (list, tuple)) else inner
        wide = 10 * sizes["hidden_dim"] + 4 * int(inner)
        wide += 8 * sizes["num_heads"] * sizes["head_dim"]
        held = wide * _DTYPES[self.dtype].itemsize
        return held if self._chunked else held + 8 * self.vocabulary

    @property
    def _base(self) -> nn.Module:
        base: nn.Module = self.model.base_model
        return base

    def _logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False, return_dict=True).logits
        return logits

    def _head(self, outputs: Any, ids: Tensor, cut: slice) -> Tensor:
        """Logits of some positions: the model with what its base returned for these alone."""
        part = copy.copy(outputs)
        part["last_hidden_state"] = outputs.last_hidden_state[:, cut]
        with _returning(self._base, part):
            return self._logits(ids[:, cut])

    def _tried(self) -> Tensor:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, self.vocabulary, (1, _TRIED))
        return torch.as_tensor(tokens, device=self.device)

    @torch.no_grad()
    def _head_is_alone(self) -> bool:
        """Whether the head of parts gives the logits of the whole."""
        if self._base is self.model:
            return False
        ids = self._tried()
        whole = self._logits(ids).float()
        outputs = self._base(input_ids=ids, use_cache=False, return_dict=True)
        if "last_hidden_state" not in outputs:
            return False
        parts = [self._head(outputs, ids, slice(n, n + 5)) for n in range(0, _TRIED, 5)]
        found = torch.cat(parts, dim=1).float()
        error = (found - whole).abs().max() if found.shape == whole.shape else math.inf
        slack = _CLOSE if self.dtype == "float32" else _CLOSE_16
        return bool(error <= slack * whole.abs().max())


def _measured(
    layer: Any, attend: Callable[..., Tensor], found: dict[int, Tensor], index: int,
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention as it was, which notes the mean distance of each head ``(H,)``."""
    tokens, of_positions = layer.tokens, torch.zeros_like(v, dtype=torch.float32)
    of_nothing = of_positions.clone()
    of_positions[..., 0] = torch.arange(v.shape[2], device=v.device) / v.shape[2]
    of_positions[..., 1] = 1

    def attended(values: Tensor) -> Tensor:
        layer.tokens = tokens  # each call takes them
        return attend(module, q.float(), k.float(), values, mask, **options)

    sums = attended(of_positions) - attended(of_nothing)  # a scheme may add to the values
    queries = torch.arange(q.shape[2], device=q.device)
    back = queries - v.shape[2] * sums[..., 0] / sums[..., 1]
    found[index] = back[..., q.shape[2] // 2 :].mean(dim=(0, 2))
    layer.tokens = tokens
    return attend(module, q, k, v, mask, **options)


@contextmanager
def _returning(module: nn.Module, value: Any) -> Iterator[None]:
    """Let a module return a value, whatever it is called with."""
    module.forward = lambda *args, **kwargs: value
    try:
        yield
    finally:
        del module.forward


def _config(folder: Path) -> Any:
    """The configuration of a causal model, or an error that says what the folder is."""
    import transformers
    from transformers.models.auto import modeling_auto

    if not folder.is_dir():
        raise FileNotFoundError(f"model: there is no folder {str(folder)!r}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no config.json, so it is no model")
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(folder / 'config.json')!r} is no JSON: {error}") from None
    config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    classes = set(known.values())
    named = given.get("architectures") or []
    if getattr(config, "is_encoder_decoder", False) or config.model_type not in known or (
        named and not classes & set(named)
    ):  # fmt: skip
        what = ", ".join(named) or f"a {config.model_type}"
        raise ValueError(f"{str(folder)!r} holds {what}, which is no causal language model")
    return config


def _check_causal(model: Any, ids: Tensor) -> None:
    """``ValueError`` if an earlier logit reads a later token, as in an encoder."""
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % max(2, int(model.config.get_text_config().vocab_size))
    one, two = (model(input_ids=x, use_cache=False).logits[:, :-1].float() for x in (ids, other))
    slack = _CLOSE if model.dtype == torch.float32 else _CLOSE_16
    if (one - two).abs().max() > slack * one.abs().max():
        raise ValueError(
            f"{type(model).__name__} is no causal language model: its logits depend on later tokens"
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"device: cannot use {name!r}: {first}") from None
    return device


def _free_memory(device: torch.device) -> int:
    """Bytes that nobody uses; 1 GiB where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 30
