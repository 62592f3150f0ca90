"""The nine steps of RadixAttention's figure (Zheng et al. 2024, figure 3) as a transcript of the real cache.

A letter is one block. Two chats share the system prompt, few-shot questions share their examples, and under a memory
limit the least recently used leaves go: the old turn in (5), the second chat in (8), and the few-shot branches that
nobody asked again in (9), where one question gets more samples. A request also leases room for an answer longer than
the one it gives; what it did not use is free afterwards. `-` are a step's evicted blocks, oldest first. The tree alone
is in test_radix_cache.py.
"""

from engine.kv.manager import KVCacheManager
from engine.kv.radix_cache import Node

LETTERS = "SUAVBWCDXYEQRPOMNxyz"
"""S system prompt. Chat one: U A, then C D, then W N M. Chat two: V B, then X Y. E examples, Q P O questions."""

TRANSCRIPT = """\
1 nothing
  (empty)
2 the first chat begins: UA
  S-U-A
3 its next turn: CD
  S-U-A-C-D
4 a second chat: VB
  S-U-A-C-D
   -V-B
5 its next turn: XY  -D-C
  S-U-A
   -V-B-X-Y
6 a few-shot question: EQR
  S-U-A
   -V-B-X-Y
  E-Q-R
7 more questions over the same examples: PR, OR
  S-U-A
   -V-B-X-Y
  E-Q-R
   -P-R
   -O-R
8 the first chat again: WNM  -Y-X-B-V
  S-U-A-W-N-M
  E-Q-R
   -P-R
   -O-R
9 more answers to P: x, y, z  -R-Q-R-R-O
  S-U-A-W-N-M
  E-P-x
     -y
     -z
"""


def _ids(text: str) -> list[int]:
    return [id for letter in text for id in (2 * LETTERS.index(letter), 2 * LETTERS.index(letter) + 1)]


def _letter(node: Node) -> str:
    return LETTERS[node.key[0] // 2]


class Story:
    def __init__(self, blocks: int) -> None:
        self.kv = KVCacheManager(blocks, 2, "m")
        self.names: dict[bytes, str] = {}
        self.lines = ["1 nothing", "  (empty)"]
        self.steps = 1

    def step(self, title: str, *requests: tuple[str, str, int]) -> None:
        """`requests` run at once: (prompt, answer, blocks of room for the answer)."""
        leases = []
        for prompt, answer, room in requests:
            tokens = _ids(prompt)
            lease = self.kv.acquire(
                b"", tokens, match_limit=len(tokens) - 1, room_tokens=len(tokens) + 2 * room
            )
            assert lease is not None, self.kv
            self.kv.copied(lease)
            leases.append((lease, _ids(prompt + answer)))
        for lease, tokens in leases:
            self.kv.commit(lease, tokens)
            self.kv.check()
        evicted = "".join("-" + self.names[identity] for identity in self.kv.take_evicted())
        for lease, _ in leases:
            self.kv.release(lease)
        self.kv.check()
        self.names |= {node.identity: _letter(node) for node in self.kv.cache.nodes()}
        self.steps += 1
        self.lines.append(f"{self.steps} {title}" + (f"  {evicted}" if evicted else ""))
        for child in self.kv.cache.root(b"").children.values():
            self.lines += ["  " + line for line in self._branch(child, 0)]

    def _branch(self, node: Node, column: int) -> list[str]:
        """The first branch goes on where its parent stands, the others under it."""
        head = _letter(node)
        lines: list[str] = []
        for child in node.children.values():
            lines += self._branch(child, column + 2)
        if not lines:
            return [head]
        indent = " " * (column + 1)
        first, *rest = lines
        return [f"{head}-{first}", *(line if line.startswith(" ") else f"{indent}-{line}" for line in rest)]


def test_the_nine_steps_of_the_figure() -> None:
    story = Story(blocks=14)
    story.step("the first chat begins: UA", ("SU", "A", 3))
    story.step("its next turn: CD", ("SUAC", "D", 3))
    story.step("a second chat: VB", ("SV", "B", 3))
    story.step("its next turn: XY", ("SVBX", "Y", 8))
    story.step("a few-shot question: EQR", ("EQ", "R", 3))
    story.step("more questions over the same examples: PR, OR", ("EP", "R", 1), ("EO", "R", 1))
    story.step("the first chat again: WNM", ("SUAW", "NM", 3))
    story.step("more answers to P: x, y, z", *(("EP", answer, 1) for answer in "xyz"))
    assert "\n".join(story.lines) + "\n" == TRANSCRIPT
