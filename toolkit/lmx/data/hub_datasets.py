"""Datasets of the Hugging Face Hub: their names in a recipe, splits and records."""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import yaml

from ..errors import UserError, error_detail
from . import builtin, readers

# name, or owner/name; then the revision, the configuration and the split, as far as the
# recipe names them. The name of a revision has neither : nor [ in git.
SOURCE = re.compile(
    r"(?P<name>[^@:\[\]]+)(?:@(?P<revision>[^:\[\]]+))?"
    r"(?::(?P<config>[^:\[\]]+))?(?:\[(?P<split>[^\[\]]+)\])?"
)
# What the client says about a dataset with several configurations.
NEEDS_CONFIG = "Config name is missing"


@dataclass(frozen=True)
class HubDataset:
    """A dataset as a recipe names it, such as openai/gsm8k@main:socratic[test].

    Attributes:
        source: the text of the recipe.
        revision, config: None = the default ones.
        split: None = the one of the role that the recipe gives to the dataset.
    """

    source: str
    name: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(
        cls, source: str, find: Callable[[str], Path | None] = Path
    ) -> "HubDataset | None":
        """The dataset that a source names; None if it is a local path, or built in.

        Args:
            find: resolves a relative path of the recipe; None = there is no such path.
        """
        if source.startswith(builtin.PREFIX):
            return None
        match, path = SOURCE.fullmatch(source), find(source) or Path(source)
        if match is None or path.exists():
            return None
        parts = match["name"].split("/")
        if len(parts) > 2 or not all(p.strip(".~") and "\\" not in p for p in parts):
            return None
        if readers.suffix(Path(source)) in readers.SUFFIXES:
            return None
        return cls(source, **match.groupdict())

    def has_split(self, role: str) -> bool:
        """Whether the dataset has a split for a role: train, valid or test.

        A source that names its split has no other.
        """
        return self.split is None and self._split(self._builder(), role) is not None

    def fingerprint(self, role: str) -> list:
        """A value that changes with the records, without reading them."""
        builder = self._builder()
        split = self._split(builder, role)
        return [self.source, split, builder.hash, builder.config_id]

    def opener(
        self, role: str, *, streaming: bool
    ) -> Callable[[], Iterator[readers.LocatedRecord]]:
        """A function that reads the split of a role from its start at every call.

        Args:
            streaming: read without downloading all of it.

        Raises:
            UserError: the dataset cannot be read, or has no such split.
        """
        import datasets

        builder = self._builder()
        split = self._split(builder, role)
        if split is None:
            splits = _splits(builder)
            wanted = repr(self.split) if self.split else f"for {role!r}"
            raise UserError(
                f"this dataset has no split {wanted}; it has {', '.join(splits)}",
                hint=f"name one, as in {self._without_split}[{splits[0]}]",
                place=self.source,
            )
        with self._errors():
            dataset = datasets.load_dataset(
                self.name,
                name=self.config,
                split=split,
                streaming=streaming,
                revision=self.revision,
            )

        def records() -> Iterator[readers.LocatedRecord]:
            with self._errors():
                for index, record in enumerate(dataset):
                    where = f"{self._without_split}/{split}[{index}]"
                    yield where, readers.without_nulls(record)

        return records

    @property
    def _without_split(self) -> str:
        return self.source.partition("[")[0]

    def _split(self, builder: Any, role: str) -> str | None:
        """The dataset's name of the split; None if it has none."""
        splits = _splits(builder)
        if self.split:
            # Some datasets are described only when they are read.
            is_known = self.split in splits or not builder.info.splits
            return self.split if is_known else None
        return next((name for name in readers.SPLITS[role] if name in splits), None)

    def _builder(self) -> Any:
        import datasets

        offline, endpoint = datasets.config.HF_HUB_OFFLINE, datasets.config.HF_ENDPOINT
        if not offline and not _online(endpoint):
            raise self._unreachable("the Hub cannot be reached")
        with self._errors():
            return datasets.load_dataset_builder(
                self.name, name=self.config, revision=self.revision
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        import datasets

        try:
            yield
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise self._unreachable(error_detail(error)) from None

    def _unreachable(self, reason: str) -> UserError:
        hint = (
            "check the name and the network, or name a local file; "
            "HF_HUB_OFFLINE=1 reads a cached copy"
        )
        if NEEDS_CONFIG in reason:
            hint = f"name a configuration, as in {self._without_split}:NAME"
        return UserError(
            "there is no such file or folder, and it cannot be read as a Hub dataset: "
            f"{reason}",
            hint=hint,
            place=self.source,
        )


def card_files(folder: Path) -> dict[str, list[Path]]:
    """The data files by split, as the dataset card of a folder of the Hub names them.

    Raises:
        UserError: the card has no default configuration, or no such files.
    """
    card = folder / "README.md"
    if not card.is_file() or b"configs:" not in card.read_bytes():
        return {}
    from datasets.data_files import DataFilesDict, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    try:
        configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data)
        if not configs:
            return {}
        if (name := configs.get_default_config_name()) is None:
            raise ValueError(f"none of {', '.join(configs)} is the default")
        patterns = sanitize_patterns(configs[name]["data_files"])
        files = DataFilesDict.from_patterns(patterns, base_path=str(folder))
    except (yaml.YAMLError, ValueError, LookupError, TypeError, OSError) as error:
        raise UserError(
            f"configs of this card cannot be read: {error_detail(error)}",
            hint="name the files in data.train and data.valid",
            place=str(card),
        ) from None
    return {
        split: [folder / os.path.relpath(name, folder) for name in names]
        for split, names in files.items()
    }


def _splits(builder: Any) -> list[str]:
    return [*(builder.info.splits or ("train",))]


def _online(endpoint: str) -> bool:
    """Whether the Hub responds. Tested first, because its client retries for 25 s."""
    if getproxies():
        return True
    url = urlsplit(endpoint)
    try:
        socket.create_connection((url.hostname, url.port or 443), timeout=10).close()
    except OSError:
        return False
    return True
