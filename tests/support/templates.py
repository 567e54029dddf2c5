"""Small chat templates, one of each kind, and what each kind is known for."""

import copy
from functools import cache

from tiny import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

_TAKE_TURNS = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
)
_GEMMA = (
    "{% for m in messages %}" + _TAKE_TURNS + "<start_of_turn>{{ 'model' if m.role == 'assistant' "
    "else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)

KINDS: dict[str, str] = {
    # neither tools nor an opinion on roles
    "chatml": (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    ),
    # tools, joined by `+`, and a variable
    "qwen3": (
        "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
        "{{ messages[0].content + '\n\n' }}{% endif %}{% for t in tools %}{{ t | tojson }}\n"
        "{% endfor %}To call: <tool_call><|im_end|>\n{% elif messages[0].role == 'system' %}"
        "{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
        "{% endfor %}<|im_end|>\n"
        "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content "
        "+ '\n</tool_response><|im_end|>\n' }}{% endif %}{% endfor %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
        "{% endif %}"
    ),
    # walks over arguments
    "qwen3_coder": (
        "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>"
        "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>{{ value }}"
        "</parameter>{% endfor %}</function></tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    ),
    # ids of nine characters, turns, the system message first, no text beside calls
    "mistral": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}"
        "{% endif %}{% set ns = namespace(index=0) %}{% for m in rest %}"
        "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.index = ns.index + 1 %}"
        "{% endif %}{% endfor %}"
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}[INST] {% if loop.first and system %}"
        "{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        "{% if c.id is not defined or c.id | length != 9 %}"
        "{{ raise_exception('ids must have nine characters') }}{% endif %}"
        '{{ c.function | tojson }}, "id": "{{ c.id }}"{% endfor %}]</s>'
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim }}</s>{% elif m.role == 'tool' %}"
        "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
        "{{ raise_exception('ids must have nine characters') }}{% endif %}"
        '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
    ),
    # ids of at least nine characters, and results and calls that are no turns
    "mistral_small": (
        "{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}[/SYSTEM_PROMPT]"
        "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{% set ns = namespace(index=0) %}"
        "{% for m in rest %}{% if m.role != 'tool' and not m.tool_calls %}"
        "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
        "{% set ns.index = ns.index + 1 %}{% endif %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        "{% if c.id | length < 9 %}{{ raise_exception('ids') }}{% endif %}"
        '{{ c.function | tojson }}, "id": "{{ c.id[-9:] }}"{% endfor %}]'
        "{% elif m.role == 'tool' %}{% if m.tool_call_id | length < 9 %}{{ raise_exception('ids') }}"
        "{% endif %}[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id[-9:] }}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    ),
    # results, and no calls
    "lfm2": (
        "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
    # no tools, no system role, turns
    "gemma2": "{{ bos_token }}" + _NO_SYSTEM + _GEMMA,
    # the system message within the first of the user
    "gemma3": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}" + _TAKE_TURNS + "<start_of_turn>{{ 'model' if m.role == 'assistant' "
        "else m.role }}\n{% if loop.first and first %}{{ first }}\n\n{% endif %}{{ m.content | trim }}"
        "<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
    ),
    # one call a message
    "llama3": (
        "{{ bos_token }}{% if tools %}<|python_tag|>{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}<|header|>ipython\n{{ m.content | tojson }}"
        "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "<|header|>assistant\n{{ m.tool_calls[0].function | tojson }}"
        "{% else %}<|header|>{{ m.role }}\n{{ m.content | trim }}{% endif %}<|eot|>{% endfor %}"
        "<|header|>assistant\n"
    ),
    # the name of a result's tool, and objects as arguments
    "functiongemma": (
        "{{ bos_token }}{% if tools %}<start_function_declaration>{{ tools | tojson }}"
        "<start_function_call>{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if not m.name %}{{ raise_exception('a result needs the name of its tool') }}{% endif %}"
        "<start_function_response>response:{{ m.name + '{value:' + m.content }}}<end_function_response>"
        "{% else %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<start_function_call>call:{{ c.function.name + '{' }}"
        "{% for name, value in c.function.arguments.items() %}{{ name }}:{{ value }},{% endfor %}}"
        "<end_function_call>{% endfor %}<end_of_turn>\n{% endif %}{% endfor %}<start_of_turn>model\n"
    ),
    # the last call's name before a result, and the first call of a message alone
    "gpt_oss": (
        "{% if tools %}{{ tools | tojson }}to=functions.{% endif %}{% set last = namespace(name='') %}"
        "{% for m in messages %}{% if m.role == 'tool' %}{% if not last.name %}"
        "{{ raise_exception('a tool message without a call') }}{% endif %}"
        "<|start|>functions.{{ last.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>"
        "{% elif m.role == 'assistant' and m.tool_calls %}{% set call = m.tool_calls[0].function %}"
        "{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}"
        "{% set last.name = call.name %}<|start|>assistant to=functions.{{ call.name }}<|message|>"
        "{{ call.arguments | tojson }}<|call|>{{ m.content }}"
        "{% else %}{% set last.name = '' %}<|start|>{{ 'developer' if m.role == 'system' else m.role }}"
        "<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
    ),
    # turns in which a result is the user's
    "alternating": (
        "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + _NO_SYSTEM + "{% for m in messages %}"
        "{% if (m.role in ['user', 'tool']) != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}[assistant]"
    ),
    # content in parts alone, as of models that read images
    "parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    ),
    # a system message first and no other
    "first_system": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('the system message must be the first') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    ),
}  # fmt: skip


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with a kind of chat template, one and the same every time."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = KINDS[kind]
    return tokenizer
