"""Whether two models have one tokenizer: tokens of the one are then tokens of the other."""

from pathlib import Path

from tokenizers import Tokenizer

from engine.text.files import TextFiles


def check_alike(served: Path, draft: Path, named: str) -> None:
    """Compare the tokenizers of two prepared models. Which of the tokens end an answer, and how many rows a model's
    embedding has behind the last token, may differ. Raises ValueError with what differs for `named`, the draft model,
    and ModelError."""
    ours, theirs = (_tokenizer(folder) for folder in (served, draft))
    own, other = ours.get_vocab(with_added_tokens=True), theirs.get_vocab(with_added_tokens=True)
    if len(own) != len(other):
        raise ValueError(f"{_refusal(named)}: it has {len(other):,} tokens, the model has {len(own):,}")
    texts, others = ({token: text for text, token in vocab.items()} for vocab in (own, other))
    for token in sorted(texts.keys() | others.keys()):
        if texts.get(token) != others.get(token):
            raise ValueError(
                f"{_refusal(named)}: token {token} is {others.get(token)!r}, in the model {texts.get(token)!r}"
            )
    specials, theirs_special = (_special(tokenizer) for tokenizer in (ours, theirs))
    for token in sorted(specials ^ theirs_special):
        where = "in the model alone" if token in specials else "in the draft model alone"
        raise ValueError(f"{_refusal(named)}: token {token}, {texts[token]!r}, is special {where}")


def _refusal(named: str) -> str:
    return f"engine.draft_model {named}: another tokenizer than the model's"


def _tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_str(TextFiles.load(folder).tokenizer)


def _special(tokenizer: Tokenizer) -> set[int]:
    return {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
