"""Prefix cache: processed prefixes are stored once and used by all requests."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ...cpu.memory import available_memory
from ...models.lora.multi_lora import BASE
from .prefix_disk import PrefixDisk, Run, RunFacts
from .sequence import CacheState, RecordedStates

MAX_ARRAYS = 250_000
"""Half of the buffers that Metal gives to a process."""


@dataclass(eq=False)
class PrefixNode:
    """A run of tokens that follows its parent's, with what the caches hold of it.

    Attributes:
        tokens: int32 [n]; empty only at the root.
        positions: keys and values of the tokens; see `CacheState.positions`. None = the
            states are on the disk alone.
        hidden: recorded hidden states [1, n, width] of the tokens, for drafters.
        layer_ids: the blocks whose outputs these are.
        snapshot: layers without positions after the last token; None = not stored.
        run: where they are on the disk; None = nowhere.
        children: by their first token.
    """

    tokens: np.ndarray
    positions: list[mx.array] | None
    parent: "PrefixNode | None" = None
    hidden: mx.array | None = None
    layer_ids: tuple[int, ...] = ()
    snapshot: list | None = None
    run: Run | None = None
    children: dict[int, "PrefixNode"] = field(default_factory=dict)

    @property
    def state(self) -> dict:
        """What is stored, without the tokens."""
        names = "positions", "hidden", "snapshot"
        return {name: getattr(self, name) for name in names}

    @state.setter
    def state(self, state: dict | None) -> None:
        state = state or {"positions": None}
        # A tree of arrays has no empty list.
        self.positions = state.get("positions", [])
        self.hidden, self.snapshot = state.get("hidden"), state.get("snapshot")

    @property
    def path(self) -> list["PrefixNode"]:
        """The nodes from the root to this one."""
        nodes = [self]
        while nodes[-1].parent:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays of the node."""
        return _arrays(self.state)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    def part(self, start: int, end: int) -> tuple[list[mx.array], mx.array | None]:
        """Copies of the positions and hidden states of some of the tokens."""
        indices = mx.arange(start, end)
        positions = [mx.take(array, indices, axis=2) for array in self.positions]
        hidden = self.hidden
        return positions, None if hidden is None else mx.take(hidden, indices, axis=1)


class PrefixCache:
    """A radix tree of prefixes in bounded memory (RadixAttention, arXiv 2312.07104).

    What requests have in common is stored once, to the token. The least recently used
    ends of the tree are dropped first. Sliding windows and recurrent states cannot be
    cut at a position: they are stored where a request was inserted.

    Args:
        max_bytes: of all stored arrays; None = an eighth of the memory available.
        disk: keeps what leaves the memory. None = it is dropped.

    Attributes:
        num_arrays: stored arrays; Metal has a limited number of buffers.
        sizes: bytes that a token and a snapshot count as, and arrays of a node; None =
            as they are. Processes that hold different layers must drop the same
            prefixes.
    """

    def __init__(self, max_bytes: int | None = None, disk: PrefixDisk | None = None):
        self.max_bytes = available_memory() // 8 if max_bytes is None else max_bytes
        self.nbytes = self.num_arrays = 0
        self.sizes: tuple[int, int, int] | None = None
        # By adapter: another one gives other keys and values.
        self.roots: dict[int, PrefixNode] = {}
        # All nodes in memory but the roots by last use. A node is used after those that
        # follow it: so no other one in memory follows the first.
        self._by_use: OrderedDict[PrefixNode, None] = OrderedDict()
        self._disk = disk
        self._on_disk: dict[Run, PrefixNode] = {}

    @property
    def root(self) -> PrefixNode:
        """The tree of prefixes that the model processed without an adapter."""
        return self._root(BASE)

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes in memory but the roots, parents first."""
        return reversed(self._by_use)

    def insert(self, tokens: Sequence[int], cache: CacheState) -> None:
        """Store a cache that has processed exactly these tokens."""
        assert len(tokens) == cache.length
        new = np.array(tokens, np.int32)
        path, matched, in_last = self._read_path(new, cache.adapter)
        if in_last:
            path[-1:] = [self._split(path[-1], in_last)]
        self._use(path[-1])
        if matched < len(new):
            end = PrefixNode(new[matched:], cache.positions(matched, len(new)))
            if self._size(end) > self.max_bytes:
                return
            self.add(path[-1], end)
            path.append(end)
        self._keep_hidden(path, cache)
        if path[-1].snapshot is None and len(new):
            self._store(path[-1], "snapshot", cache.snapshot())
        mx.async_eval(path[-1].arrays)
        while self.nbytes > self.max_bytes or self.num_arrays > MAX_ARRAYS:
            oldest = next(iter(self._by_use))
            if self._write(oldest):
                self._forget(oldest)
                oldest.state = None
            else:
                self._remove(oldest)
        self._limit_disk()

    def fetch(
        self, tokens: Sequence[int], new_cache: Callable[[], CacheState]
    ) -> tuple[CacheState, int]:
        """A cache that contains the longest stored prefix of the tokens.

        The last token is never included, because its logits are needed.

        Args:
            new_cache: makes empty caches, all for the same adapter.

        Returns:
            The cache, and the number of tokens that match. Those are more than it has
            processed where no snapshot was stored at their end.
        """
        cache = new_cache()
        new = np.array(tokens[:-1], np.int32)
        path, matched, in_last = self._read_path(new, cache.adapter)
        self._use(path[-1])
        if not cache.has_snapshot:
            _restore(cache, path, in_last)
            return cache, matched
        if in_last:
            last = path[-1]
            if last.snapshot is not None:
                # A window has some positions more, and can be cut a little.
                _restore(cache, path)
                if cache.trim(len(last.tokens) - in_last):
                    return cache, matched
                cache = new_cache()
            path.pop()
        while path[-1].parent and path[-1].snapshot is None:
            path.pop()
        _restore(cache, path)
        return cache, matched

    def match(self, tokens: Sequence[int], adapter: int = BASE) -> int:
        """The number of tokens, from the first one, that are stored."""
        return self._walk(np.array(tokens, np.int32), adapter)[1]

    def drop(self, adapter: int) -> None:
        """Drop everything of an adapter from memory."""
        if adapter in self.roots:
            for node in _subtree(self.roots.pop(adapter))[1:]:
                self._on_disk.pop(node.run, None)
                if node.positions is not None:
                    self._forget(node)

    def save(self) -> None:
        """Write everything to the disk, if there is one."""
        if self._disk:
            for node in self._by_use:
                self._write(node)
            self._limit_disk()
            self._disk.keep_order()

    def add(self, parent: PrefixNode, node: PrefixNode) -> None:
        """Add a new end to the tree."""
        node.parent = parent
        parent.children[int(node.tokens[0])] = node
        self._count(node)
        self._use(node)

    def _walk(
        self, tokens: np.ndarray, adapter: int
    ) -> tuple[list[PrefixNode], int, int]:
        """Follow the tokens from the root of an adapter.

        Returns:
            The nodes, the number of tokens that match, and how many of them are in the
            last node if that matches in part, else 0.
        """
        path, matched = [self._root(adapter)], 0
        while matched < len(tokens):
            node = path[-1].children.get(int(tokens[matched]))
            if node is None:
                break
            common = common_length(node.tokens, tokens[matched:])
            path.append(node)
            matched += common
            if common < len(node.tokens):
                return path, matched, common
        return path, matched, 0

    def _root(self, adapter: int) -> PrefixNode:
        """The root of an adapter, with the runs on the disk below it."""
        if adapter in self.roots:
            return self.roots[adapter]
        root = self.roots[adapter] = PrefixNode(np.zeros(0, np.int32), [])
        if self._disk:
            root.run = self._disk.run(self._disk.model_hash(adapter), [])
            model, first = root.run
            nodes = {first: root}
            for run, facts in self._disk.runs(model):
                parent = nodes.get(facts.parent)
                if parent is None or facts.tokens[0] in parent.children:
                    # What it follows is gone, or another process wrote the same.
                    self._disk.delete(run)
                    continue
                tokens, layer_ids = np.array(facts.tokens, np.int32), facts.layer_ids
                node = PrefixNode(tokens, None, parent, None, tuple(layer_ids), run=run)
                parent.children[facts.tokens[0]] = node
                nodes[run[1]] = self._on_disk[run] = node
        return root

    def _read_path(
        self, tokens: np.ndarray, adapter: int
    ) -> tuple[list[PrefixNode], int, int]:
        """What `_walk` returns; all nodes are in memory."""
        while True:
            path, matched, in_last = self._walk(tokens, adapter)
            for node in path:
                if node.positions is None:
                    state = self._disk.read(node.run)
                    if state is None:
                        self._remove(node)
                        break
                    node.state = state
                    self._count(node)
                    self._use(node)
            else:
                return path, matched, in_last

    def _write(self, node: PrefixNode) -> bool:
        """Write a node to the disk; returns whether it is there."""
        if self._disk and node.run is None:
            path = node.path
            model, _ = path[0].run
            prefix = np.concatenate([each.tokens for each in path]).tolist()
            start = len(prefix) - len(node.tokens)
            facts = RunFacts(
                parent=self._disk.run(model, prefix[:start])[1],
                start=start,
                tokens=prefix[start:],
                layer_ids=[*node.layer_ids],
            )
            run = self._disk.run(model, prefix)
            if self._disk.write(run, facts, node.state):
                node.run, self._on_disk[run] = run, node
        return node.run is not None

    def _erase(self, node: PrefixNode) -> None:
        """Delete a node from the disk, where its states are others now."""
        if node.run:
            del self._on_disk[node.run]
            self._disk.delete(node.run)
            node.run = None

    def _limit_disk(self) -> None:
        while self._disk and (run := self._disk.surplus()):
            node = self._on_disk.get(run)
            if node is None:
                self._disk.delete(run)
            elif node.positions is None:
                self._remove(node)
            else:
                self._erase(node)

    def _remove(self, node: PrefixNode) -> None:
        """Remove a node, and those that follow it, from the tree and the disk."""
        del node.parent.children[int(node.tokens[0])]
        for each in _subtree(node):
            self._erase(each)
            if each.positions is not None:
                self._forget(each)

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Cut a node in two; returns the upper one."""
        self._erase(node)
        self._count(node, -1)
        parent, size = node.parent, len(node.tokens)
        positions, hidden = node.part(0, at)
        upper = PrefixNode(node.tokens[:at], positions, parent, hidden, node.layer_ids)
        parent.children[int(upper.tokens[0])] = upper
        node.positions, node.hidden = node.part(at, size)
        node.tokens, node.parent = node.tokens[at:], upper
        upper.children[int(node.tokens[0])] = node
        mx.async_eval(upper.arrays, node.arrays)
        self._count(upper)
        self._count(node)
        return upper

    def _keep_hidden(self, path: Sequence[PrefixNode], cache: CacheState) -> None:
        """Keep the hidden states of tokens that have none yet, for this drafter."""
        if not (recorded := cache.recorded):
            return
        end = 0
        for node in path[1:]:
            start, end = end, end + len(node.tokens)
            if node.layer_ids != recorded.layer_ids and recorded.start <= start:
                node.layer_ids = recorded.layer_ids
                indices = mx.arange(end - start)
                hidden = mx.take(recorded.since(start), indices, axis=1)
                mx.async_eval(hidden)
                self._store(node, "hidden", hidden)

    def _use(self, node: PrefixNode) -> None:
        """Count a use of a node, and then of those that it follows."""
        for each in node.path[:0:-1]:
            if each.positions is not None:
                self._by_use[each] = None
                self._by_use.move_to_end(each)
            if each.run:
                self._disk.use(each.run)

    def _forget(self, node: PrefixNode) -> None:
        """Count a node no more, which has left the memory."""
        del self._by_use[node]
        self._count(node, -1)

    def _count(self, node: PrefixNode, sign: int = 1) -> None:
        """Count what a node holds, or with -1 no more."""
        self.nbytes += sign * self._size(node)
        self.num_arrays += sign * (self.sizes[2] if self.sizes else len(node.arrays))

    def _size(self, node: PrefixNode) -> int:
        """Bytes that a node counts as."""
        if self.sizes is None:
            return node.nbytes
        per_token, per_snapshot, _ = self.sizes
        has_snapshot = node.snapshot is not None
        return len(node.tokens) * per_token + has_snapshot * per_snapshot

    def _store(self, node: PrefixNode, name: str, states: list | mx.array) -> None:
        """Let a node hold these states, and count them."""
        self._erase(node)
        self._count(node, -1)
        setattr(node, name, states)
        self._count(node)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    count = min(len(first), len(second))
    first, second = (np.asarray(each[:count], np.int32) for each in (first, second))
    different = np.flatnonzero(first != second)
    return int(different[0]) if len(different) else count


def _subtree(node: PrefixNode) -> list[PrefixNode]:
    """A node and all that follow it."""
    nodes = [node]
    for each in nodes:
        nodes += each.children.values()
    return nodes


def _arrays(tree: list | dict) -> list[mx.array]:
    return [part for _, part in tree_flatten(tree) if isinstance(part, mx.array)]


def _restore(cache: CacheState, path: Sequence[PrefixNode], in_last: int = 0) -> None:
    """Fill an empty cache with what nodes from the root on hold.

    Args:
        in_last: tokens of the last node; 0 = all of it.
    """
    nodes = path[1:]
    if not nodes:
        return
    stored = [(node.positions, node.hidden) for node in nodes]
    length = sum(len(node.tokens) for node in nodes)
    if in_last:
        stored[-1] = nodes[-1].part(0, in_last)
        length += in_last - len(nodes[-1].tokens)
    positions = [
        mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
        for parts in zip(*(positions for positions, _ in stored), strict=True)
    ]
    cache.restore(positions, nodes[-1].snapshot if cache.has_snapshot else [], length)
    # Hidden states of the last tokens, as far as they are stored for one drafter.
    layer_ids, hidden = nodes[-1].layer_ids, []
    for node, (_, states) in zip(reversed(nodes), reversed(stored), strict=True):
        if node.layer_ids != layer_ids or states is None:
            break
        hidden.insert(0, states)
    if hidden:
        start = length - sum(states.shape[1] for states in hidden)
        cache.recorded = RecordedStates(layer_ids, start)
        for states in hidden:
            cache.recorded.append(states)
