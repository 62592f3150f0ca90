"""Two dozen varied prompts: 1 to 1,500 tokens, languages, code, emoji, chats that share a system prompt."""

from engine.text.bundle import TextModel
from tests.engine.text.chats import chat

PARAGRAPH = (
    "The mill stood where the river bent, and the channel that fed its wheel had been cut by hand. "
    "In dry summers the miller opened the upper gate at night, when nobody upstream was watering, and let the "
    "pond fill until morning. By noon the stones had eaten it all. He wrote every sack in a ledger: who brought "
    "it, what it weighed, and how long the water had lasted. After forty years the ledger knew the river better "
    "than he did. "
)
CODE = '''def migrate(blocks, source, target):
    """Copy blocks and return how many bytes moved."""
    moved = 0
    for block in blocks:
        target[block.index][:] = source[block.index]
        moved += block.nbytes
    return moved
'''
TEXTS = (
    "Once upon a time",
    "The three laws of thermodynamics say that",
    "Die Hauptstadt von Österreich heißt Wien, und die Hauptstadt von Italien heißt",
    "El río nace en la montaña y desemboca en el mar. Por el camino",
    "Ceci n'est pas une pipe. Le peintre belge voulait dire que",
    "Быстрая коричневая лиса прыгает через",
    "春眠不覚暁、処処聞啼鳥。この詩は",
    "مرحبا بالعالم، هذا اختبار",
    "🚀🎉 Launch day! 👩‍🚀👨‍👩‍👧‍👦 Today we",
    "1 2 3 5 8 13 21 34 55 89 144 233 377 610 987",
    CODE + "\n\ndef test_migrate():\n",
    "SELECT name, count(*) FROM workers WHERE pool = 'decode' GROUP BY",
    "  \t\n\n   leading blanks,\ttabs and\r\nline ends   ",
)
LENGTHS = (1, 15, 16, 17, 128, 129, 600, 1500)
SYSTEM = "You are a patient teacher who answers in short, plain sentences. " + PARAGRAPH
CHATS = (
    [("system", SYSTEM), ("user", "Why is the sky blue?")],
    [("system", SYSTEM), ("user", "Why is the sea salty? Answer like a pirate. 🏴‍☠️")],
    [
        ("system", SYSTEM),
        ("user", "Why is the sky blue?"),
        ("assistant", "Because air scatters blue light more than red light."),
        ("user", "And at sunset?"),
    ],
)


def prompts(text: TextModel) -> list[list[int]]:
    """24 prompts as token ids, in a fixed order."""
    endless = text.encode(PARAGRAPH * 40, add_special=False)
    found = [text.encode(one, add_special=False) for one in TEXTS]
    found += [endless[start : start + n] for start, n in enumerate(LENGTHS)]
    found += [text.encode_chat_text(text.render_chat(chat(one))) for one in CHATS]
    return found
