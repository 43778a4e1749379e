"""`lmx.load` and `lmx.Model`: a loaded model with its tokenizer."""

import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mlx.nn.layers.base import Module

from .. import cpu
from ..convert.importers import load_model
from ..files.atomic import MANIFEST
from ..generation.generator import Generator
from ..generation.kv_cache.eviction import KVLimit
from ..generation.speculative.draft_length import DraftLengthController
from ..generation.speculative.factory import proposer_factory
from ..models.checkpoint import model_folder
from ..models.loader import LoadedModel
from .arguments import PathLike, checked
from .run import Run

ModelLike = PathLike | Run


class Model:
    """A model in memory, for `lmx.generate` and `lmx.evaluate`.

    Args:
        loaded: the model, its tokenizer and its files.
        adapter: the folder of the adapter in the model, which `path` does not have.
        draft: the default draft of `lmx.generate`; see `load`.
        trust_remote_code: whether a draft model may run Python code of its own.

    Attributes:
        module: mlx-lm's model, from tokens int [B, L] to logits [B, L, V].
        tokenizer: mlx-lm's tokenizer.
        config: config.json.
        path: the folder of the checkpoint.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        adapter: Path | None = None,
        draft: str | None = None,
        trust_remote_code: bool = False,
    ):
        self.loaded = loaded
        self.module: Module = loaded.model
        self.tokenizer: Any = loaded.tokenizer
        self.config: dict[str, Any] = loaded.config
        self.path: Path = loaded.path
        self.adapter, self.draft = adapter, draft
        self._trust_remote_code = trust_remote_code
        self._generators: dict[tuple[str | int | KVLimit | None, ...], Generator] = {}

    def generator(
        self,
        draft: str | None = None,
        num_draft_tokens: int | None = None,
        *,
        kv_bits: int | None = None,
        kv_limit: KVLimit | None = None,
    ) -> Generator:
        """The engine behind `lmx.generate`, kept for the next call.

        Args:
            draft: as in `load`; None = that of this model, if it has one.
            num_draft_tokens: draft tokens per step; None = adapted to the speed-up.
            kv_bits: 2 to 6 or 8 = quantize the KV cache, 16 = not; None = as
                config.json says.
            kv_limit: see `CacheState`.

        Raises:
            UserError: the draft model does not load, or has another tokenizer.
        """
        key = draft or self.draft, num_draft_tokens, kv_bits, kv_limit
        if key not in self._generators:
            self._generators[key] = make_generator(
                self.loaded,
                key[0],
                num_draft_tokens,
                trust_remote_code=self._trust_remote_code,
                kv_bits=kv_bits,
                kv_limit=kv_limit,
            )
        return self._generators[key]

    def __repr__(self) -> str:
        return f"<lmx.Model {self.config.get('model_type')}: {self.path}>"


def make_generator(
    loaded: LoadedModel,
    draft: str | None,
    num_draft_tokens: int | None,
    *,
    trust_remote_code: bool,
    kv_bits: int | None,
    **options: Any,
) -> Generator:
    """The generator of a model, which decodes speculatively if there is a draft.

    Args:
        draft: a name for `proposer_factory`.
        kv_bits: None = as config.json says.
        options: further ones of `Generator`.

    Raises:
        UserError: the draft model does not load, or has another tokenizer.
    """
    if draft:
        load_draft = partial(load_model, trust_remote_code=trust_remote_code)
        make_proposer = proposer_factory(draft, loaded, load_draft=load_draft)
        options["make_proposer"] = make_proposer
        options["draft_length"] = DraftLengthController(fixed=num_draft_tokens)
    bits = kv_bits or loaded.kv_bits
    return Generator(loaded.model, loaded.tokenizer, kv_bits=bits, **options)


@checked
def load(
    source: ModelLike,
    adapter: PathLike | None = None,
    draft: PathLike | Run | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    compute: Literal["auto", "stored", "float32", "float16", "bfloat16"] = "auto",
) -> Model:
    """Load a model.

    Args:
        source: a folder or GGUF file, a Hub id, a run directory, or a `Run`.
        adapter: folder of a LoRA or DoRA adapter of mlx-lm or peft.
        draft: draft tokens for speculative decoding, which gives the same output
            faster: a model folder, a Hub id, a `Run` with a draft model,
            "prompt-lookup", "mtp", or "prompt-lookup+" one of these.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: run Python code from the checkpoint.
        compute: "auto" (float32 on a CPU, else as stored), "stored", or the name of a
            type.

    Raises:
        UserError: the model or the adapter does not exist or does not load.
    """
    cpu.enable()
    if isinstance(draft, Run):
        draft = draft.draft_path
    loaded = load_model(
        model_path(source),
        revision=revision,
        trust_remote_code=trust_remote_code,
        compute=compute,
        adapter=Path(adapter) if adapter else None,
    )
    name = None if draft is None else os.fspath(draft)
    return Model(
        loaded,
        adapter=Path(adapter) if adapter else None,
        draft=name,
        trust_remote_code=trust_remote_code,
    )


def model_path(source: "ModelLike | Model") -> str:
    """The folder, file or Hub id of a model; of a run, that of its last model."""
    if isinstance(source, Run | Model):
        return str(source.model_path if isinstance(source, Run) else source.path)
    folder = Path(os.path.expanduser(source))
    name = model_folder(os.fspath(source))
    if name == os.fspath(source) and os.path.isfile(folder / MANIFEST):
        return str(Run(folder).model_path)
    return name
