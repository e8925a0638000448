"""Chat templates in the shape of published ones, tokenizers of their kinds, and conversations."""

# ruff: noqa: E501 - the templates have the long lines of published ones

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}
{%- for m in loop_messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if loop.index0 == 0 and system %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] %}
{%- else %}{% set content = m['content'] %}{% endif %}
{%- if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

GENERATION = """{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}
{{- '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA_3 = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}{% endif %}
{{- ns.system + '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'ipython' or message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}}<|eot_id|>
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools is not none and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson(ensure_ascii=False) }}[/AVAILABLE_TOOLS]{% endif %}
{%- if loop.last and system is defined %}[INST] {{ system + '\\n\\n' + m.content }}[/INST]
{%- else %}[INST] {{ m.content }}[/INST]{% endif %}
{%- elif m.tool_calls is defined %}[TOOL_CALLS] [
{%- for call in m.tool_calls %}{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS] {"content": {{ m.content }}}[/TOOL_RESULTS]
{%- endif %}{% endfor %}"""

QWEN_3 = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=messages | length - 1, multi=true) %}
{%- for message in messages[::-1] %}
{%- set index = (messages | length - 1) - loop.index0 %}
{%- if ns.multi and message.role == 'user' and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.multi = false %}{% set ns.last = index %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role in ('user', 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ '<|im_start|>assistant\\n' + content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
{%- if message.content is string %}{{ message.content | trim }}
{%- else %}{% for part in message.content %}{{ part.text | trim }}{% endfor %}{% endif %}
{{- '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# The generation prompt begins the reasoning, and the answers of earlier turns have none.
R1 = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<\uff5cUser\uff5c>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"""

PLAIN = """{% for m in messages %}{% if m.content == '' %}{% continue %}{% endif %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

HARMONY = """{%- set call = namespace(name=none) %}{%- set reasoned = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'assistant' and not m.tool_calls %}{%- set reasoned.last = loop.index0 %}
{%- endif %}{%- endfor %}
{{- '<|start|>system<|message|>' + (model_identity | default('You are a model.')) }}
{%- if tools %}{{- '\n# Tools\n' + tools[0].function | tojson }}{%- endif %}{{- '<|end|>' }}
{%- for m in messages %}{%- if m.role == 'assistant' %}
{%- if m.thinking and loop.index0 >= reasoned.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{%- if m.tool_calls %}{%- set call.name = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- endif %}
{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + call.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""As gpt-oss: a result names its call, and only the last turn keeps its reasoning and ends with <|return|>."""
TEMPLATES = {
    "llama-2": LLAMA_2, "chatml": CHATML, "generation": GENERATION, "llama-3": LLAMA_3, "mistral": MISTRAL,
    "qwen-3": QWEN_3, "gemma": GEMMA, "r1": R1, "plain": PLAIN, "harmony": HARMONY,
}  # fmt: skip
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]",
    "[/INST]", "[TOOL_CALLS]", "<start_of_turn>", "<end_of_turn>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
)  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
]
CALL = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": {"city": "Z\u00fcrich"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief, caf\u00e9."}
TALKS: dict[str, dict[str, Any]] = {
    "one": {"messages": [user("What is 2 + 2?"), said("4.")]},
    "system": {
        "messages": [SYSTEM, user("Hi "), said("  Hello, you.\n"), user("Continue."), said("\U0001f600 of course")]
    },
    "same": {"messages": [user("go"), said("go"), user("go"), said("go"), user("go"), said("go")]},
    "open": {"messages": [user("a"), said("b"), user("and c?")]},
    "thinking": {
        "messages": [
            user("2 + 2?"),
            said("<think>\nadd\n</think>\n\n4."),
            user("+ 1?"),
            said("<think>\nmore\n</think>\n\n5."),
        ]
    },
}
TOOL_TALKS: dict[str, dict[str, Any]] = {
    "tools": {
        "tools": TOOLS,
        "messages": [
            user("Weather in Z\u00fcrich?"), said(None, tool_calls=[CALL]), {"role": "tool", "content": '"20 \u00b0C"'},
            said("It is 20 \u00b0C."), user("Thanks, and there?"), said("Where?"),
        ],
    },
}  # fmt: skip
READS_TOOLS = ("llama-3", "mistral", "qwen-3", "harmony")


def tokenizer_file(folder: Path, kind: str, special: bool) -> Path:
    """A tokenizer.json with a tokenizer_config.json beside it. `kind`: byte-level (GPT-2), split (Llama 3, by a regular
    expression), metaspace or prepend (Llama 2: a space before a text and behind a special token)."""
    text = [template for template in TEMPLATES.values()] + [json.dumps(TALKS)] * 3
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "split":
        tokenizer = Tokenizer(models.BPE(ignore_merges=True))
        words = Regex(
            r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        if kind == "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        else:
            tokenizer.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([line for each in text for line in each.split("\n")], trainer)
    if alphabet:
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.add_tokens([f"<0x{byte:02X}>" for byte in range(256)])
    tokens = list(SPECIAL) if special else ["<s>", "</s>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder / "tokenizer.json"
