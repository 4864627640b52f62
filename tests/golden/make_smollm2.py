"""Makes tests/golden/smollm2: what Hugging Face transformers computes with the folder that `experiments.get_model smollm2` writes.

Runs in an environment of its own, never the project's:

    python -m experiments.get_model smollm2
    python3.11 -m venv /tmp/torch-venv
    /tmp/torch-venv/bin/pip install torch==2.13.0 transformers==5.24.0     # torch's CPU build is enough
    /tmp/torch-venv/bin/python tests/golden/make_smollm2.py .cache/models/smollm2

On CPU, float32, eager attention. Also checked here: `tokenizer.json` read by the library `tokenizers` gives the ids of transformers.

reference.npz
    tokens [T] int32        ids of reference.json's `text`, without a beginning-of-text token
    positions [8] int32     of `logits` float32 [8, V], all of the vocabulary
    columns [64] int32      of `column_logits` float32 [T, 64], at every position
    logsumexp [T] float32, top_ids [T, 5] int32, top_logits [T, 5] float32, at every position
    reply [N] int32         the greedy answer to reference.json's first chat, the end of the turn included
reference.json
    versions, text, reply (as text), reply_margin (smallest lead of a greedy token over the runner-up),
    chats [{messages, tokens}]: conversations and the ids that transformers' apply_chat_template makes of them
"""

import json
import pathlib
import platform
import sys

import numpy as np
import tokenizers
import torch
import transformers

OUT = pathlib.Path(__file__).parent / "smollm2"
QUESTION = "What is the capital of France? Answer in one word."
TEXT = '''The Arctic tern flies from pole to pole and back, some 71,000 km a year; it sees more daylight than any other animal.
"How far is that?" asked Zoë. "Nearly twice around the Earth's equator," he said, "and it's done every year!"

```python
def fibonacci(n: int) -> list[int]:
    """The first n Fibonacci numbers."""
    a, b, out = 0, 1, []
    while len(out) < n:
        out.append(a)
        a, b = b, a + b  # 0, 1, 1, 2, 3, 5, 8, ...
    return out
```

Das Maß ist voll: 3,14 €/m², −40 °C ≈ −40 °F. 北京は中国の首都です。 Привет, мир! 🐧🇫🇮 ½ + ¼ = ¾
\tx_{n+1} = x_n - f(x_n) / f'(x_n)   <p class="a">&nbsp;</p>
'''
CHATS = [
    [("user", QUESTION)],
    [("system", "You answer in French."), ("user", "Hello!"), ("assistant", "Bonjour ! Ça va ?"), ("user", "  two spaces\n\nand 42\n")],
    [("user", "1+1?"), ("assistant", "2"), ("user", "\nSure?")],
]


def main(folder: pathlib.Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    code = [path.read_text(encoding="utf-8") for path in sorted(pathlib.Path(__file__).parent.parent.glob("*.py"))]
    for text in [TEXT, *code, "<|im_start|>user\n1 2  345<|im_end|>\n"]:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == library.encode(text, add_special_tokens=False).ids

    tokens = torch.tensor(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    positions = torch.linspace(0, len(tokens) - 1, 8).long()
    columns = torch.linspace(0, logits.shape[1] - 1, 64).long()
    top = logits.topk(5)

    prompts = [chat_tokens(tokenizer, chat) for chat in CHATS]
    reply, margin = greedy(model, prompts[0], tokenizer.eos_token_id)
    assert "Paris" in tokenizer.decode(reply), tokenizer.decode(reply)

    OUT.mkdir(exist_ok=True)
    np.savez_compressed(
        OUT / "reference.npz", tokens=tokens.int(), positions=positions.int(), logits=logits[positions], columns=columns.int(),
        column_logits=logits[:, columns], logsumexp=logits.logsumexp(-1), top_ids=top.indices.int(), top_logits=top.values,
        reply=np.array(reply, np.int32))
    reference = {
        "versions": {"python": platform.python_version(), **{m.__name__: m.__version__ for m in (torch, transformers, tokenizers, np)}},
        "text": TEXT,
        "reply": tokenizer.decode(reply),
        "reply_margin": margin,
        "chats": [{"messages": chat, "tokens": prompt} for chat, prompt in zip(CHATS, prompts, strict=True)],
    }
    (OUT / "reference.json").write_text(json.dumps(reference, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(tokens)} tokens; reply {reference['reply']!r}, margin {margin:.3f}; mean loss "
          f"{torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]):.4f}")


def chat_tokens(tokenizer, chat) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in chat]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


@torch.no_grad()
def greedy(model, prompt: list[int], end: int, limit: int = 32) -> tuple[list[int], float]:
    """By full forwards: the tokens and the smallest lead of one over its runner-up."""
    tokens, margin = list(prompt), float("inf")
    while len(tokens) - len(prompt) < limit and (len(tokens) == len(prompt) or tokens[-1] != end):
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt):], margin


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
