"""Chat templates written anew to the grammar of the supported families, and tokenizers for them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import tokenizers
from tokenizers import Tokenizer as Backend

from jaxfp8rl.data.tokenizer import Tokenizer

QWEN_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n\\n<tools>' }}{% for tool in tools %}
{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each call, return a JSON object within <tool_call></tool_call>:\\n' }}
{{- '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}{% endif %}
"""
QWEN_TOOL_RESULT = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
"""
CHATML = QWEN_TOOLS + """\
{%- for m in messages %}
{%- if m.role == 'tool' %}""" + QWEN_TOOL_RESULT + """\
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# drops the thoughts of turns before the last question
QWEN3 = QWEN_TOOLS + """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}""" + QWEN_TOOL_RESULT + """\
{%- elif m.role == 'assistant' %}
{%- set content, thought = m.content, '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and thought %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Respond in the format {"name": function name, "parameters": dictionary}.\\n' }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA = """\
{{- '<bos>' }}
{%- for m in messages %}
{%- if m.role not in ('user', 'assistant') %}{{ raise_exception('only user and assistant') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
MISTRAL = """\
{{- '<s>' }}{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + ' [/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}{%- endfor %}"""


class Family(NamedTuple):
    """ends: the tokens that end a turn, the template's own first. tool: whether it takes the role "tool"."""

    template: str
    ends: tuple[str, ...]
    added: tuple[str, ...]
    tool: bool = True


FAMILIES = {
    "Qwen2.5": Family(CHATML, ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>",)),
    "Qwen3": Family(QWEN3, ("<|im_end|>", "<|endoftext|>"), ("<|im_start|>", "<think>", "</think>")),
    "Llama 3": Family(LLAMA3, ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
                      ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")),
    "Gemma": Family(GEMMA, ("<end_of_turn>", "<eos>"), ("<bos>", "<start_of_turn>", "\n", "\n\n"),
                    tool=False),
    "Mistral": Family(MISTRAL, ("</s>",), ("<s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")),
}


@functools.cache
def tokenizer(name: str, tools: bool = False) -> Tokenizer:
    """A byte-level BPE with the template of a family."""
    family, bpe = FAMILIES[name], tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(["what is the answer of it", "<tool_call> the number is 12", "  so \n\n so"] * 3,
                            vocab_size=300, show_progress=False)
    backend = Backend.from_str(bpe._tokenizer.to_str())
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False)
                                for t in (*family.ends, *family.added)])
    ends = [backend.token_to_id(t) for t in family.ends]
    return Tokenizer(backend, {"eos_token": family.ends[0]}, ends, ends[0], {"default": family.template})
