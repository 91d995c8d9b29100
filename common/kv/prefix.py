"""Which blocks hold which token prefix. Sans-I/O: neither references nor memory, only names and block ids."""

from collections.abc import Callable, Sequence, Set

from common.kv.chain import Scope, TokenChain, digest_after
from common.kv.pool import NULL_BLOCK, BlockId


class _Node:
    """One cached block, behind the node of the block before it. The root of a scope has no block."""

    __slots__ = ("block", "children", "digest", "has_rows", "parent", "tokens")

    def __init__(
        self, digest: bytes, tokens: bytes, parent: "_Node | Scope", block: BlockId, *, has_rows: bool = False
    ) -> None:
        self.digest = digest
        self.tokens = tokens
        #: A root has none, but its scope.
        self.parent = parent
        self.block = block
        self.has_rows = has_rows
        self.children: dict[bytes, _Node] = {}


class PrefixIndex:
    """A forest: one tree per scope, one node per cached block, whose children are found by their digest.

    A node stands for a prefix only if its tokens, and those of all nodes before it, are the prefix's. So two prefixes
    of one digest are never taken for each other; the second of them is just not cached.
    """

    def __init__(self) -> None:
        self._roots: dict[Scope, _Node] = {}
        self._nodes: dict[BlockId, _Node] = {}

    @property
    def blocks(self) -> Set[BlockId]:
        """All cached blocks."""
        return self._nodes.keys()

    def match(self, chain: TokenChain, max_blocks: int, *, rows: bool) -> list[BlockId]:
        """Blocks that hold the longest cached prefix, at most `max_blocks`; with `rows` only such as have them."""
        blocks: list[BlockId] = []
        node = self._roots.get(chain.scope)
        while node is not None and len(blocks) < min(max_blocks, len(chain)):
            node = _child(node, chain, len(blocks))
            if node is None or (rows and not node.has_rows):
                break
            blocks.append(node.block)
        return blocks

    def insert(
        self, chain: TokenChain, blocks: Sequence[BlockId], has_rows: Callable[[BlockId], bool]
    ) -> tuple[list[BlockId], list[BlockId]]:
        """Makes the first blocks of a sequence findable: all of `blocks`, as far as `chain` names them.

        A prefix that is cached already stays in its block, unless that has no rows and the new one has.

        Returns:
            Blocks that are cached from now on, and blocks that are not any more.
        """
        added: list[BlockId] = []
        replaced: list[BlockId] = []
        blocks = blocks[: len(chain)]
        start, node = self._deepest(chain.scope, blocks)
        for at in range(start, len(blocks)):
            block, child = blocks[at], _child(node, chain, at)
            if child is None:
                if chain.digests[at] in node.children:
                    break  # other tokens of this digest
                child = self._add(node, chain, at, block, has_rows=has_rows(block))
                added.append(block)
            elif not child.has_rows and has_rows(block):
                replaced.append(child.block)
                self._move(child, block)
                added.append(block)
            node = child
        self._drop_root_if_bare(chain.scope)
        return added, replaced

    def remove(self, block: BlockId) -> list[BlockId]:
        """Forgets a block and all that follow it, which nobody could find any more; returns them, the last first."""
        top = self._nodes[block]
        above = top.parent
        assert isinstance(above, _Node), "a root has no block"
        del above.children[top.digest]
        if isinstance(above.parent, Scope):
            self._drop_root_if_bare(above.parent)
        found, subtree = [top], list[BlockId]()
        while found:
            node = found.pop()
            subtree.append(node.block)
            del self._nodes[node.block]
            found += node.children.values()
        return subtree[::-1]

    def clear(self) -> list[BlockId]:
        """Forgets everything; returns the blocks."""
        blocks = list(self._nodes)
        self._roots.clear()
        self._nodes.clear()
        return blocks

    def blocks_with_rows(self) -> list[BlockId]:
        """Cached blocks that promise routing rows."""
        return [block for block, node in self._nodes.items() if node.has_rows]

    def check_invariants(self) -> list[str]:
        """Violations, one sentence each."""
        found, num_reached = [], 0
        for scope, root in self._roots.items():
            if not root.children or root.digest != scope.digest():
                found.append(f"the root of {scope} has no blocks or a digest that is not its own")
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            for digest, child in node.children.items():
                if child.parent is not node or not digest == child.digest == digest_after(node.digest, child.tokens):
                    found.append(f"block {child.block} is filed under a digest that is not its own")
                if self._nodes.get(child.block) is not child:
                    found.append(f"block {child.block} is in the tree but not known to be cached")
            num_reached += len(node.children)
            nodes += node.children.values()
        if num_reached != len(self._nodes):
            found.append(f"{num_reached} blocks can be found, but {len(self._nodes)} are said to be cached")
        return found

    def _deepest(self, scope: Scope, blocks: Sequence[BlockId]) -> tuple[int, _Node]:
        """The last of a sequence's own blocks that is cached, as (its number plus one, its node), or the root.

        A block is filed under nothing but what it holds, so that its node stands for the sequence's prefix.
        """
        for at in range(len(blocks), 0, -1):
            node = self._nodes.get(blocks[at - 1])
            if node is not None:
                return at, node
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = _Node(scope.digest(), b"", scope, NULL_BLOCK)
        return 0, root

    def _add(self, node: _Node, chain: TokenChain, at: int, block: BlockId, *, has_rows: bool) -> _Node:
        child = _Node(chain.digests[at], chain.tokens[at], node, block, has_rows=has_rows)
        node.children[child.digest] = self._nodes[block] = child
        return child

    def _move(self, node: _Node, block: BlockId) -> None:
        """The same prefix, from now on in a block that has its rows too."""
        del self._nodes[node.block]
        node.block, node.has_rows = block, True
        self._nodes[block] = node

    def _drop_root_if_bare(self, scope: Scope) -> None:
        root = self._roots.get(scope)
        if root is not None and not root.children:
            del self._roots[scope]


def _child(node: _Node, chain: TokenChain, at: int) -> _Node | None:
    """The cached block number `at` of the chain, behind `node`."""
    child = node.children.get(chain.digests[at])
    return child if child is not None and child.tokens == chain.tokens[at] else None
