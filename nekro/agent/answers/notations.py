"""Notations of model families: reasoning, ends of an answer, calls of tools.

Each is one table. A model writes a notation into its answer as ordinary text when the endpoint does not parse
it, so all of them are recognised whatever the model is called.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "ANSWER_TAGS",
    "BOX",
    "BOXED",
    "CALL_LABELS",
    "CALL_MARK",
    "CODE_END",
    "HARMONY_TOKEN",
    "HEADED",
    "NAKED_HARMONY",
    "REASONING",
    "ROLE_HEADER",
    "STOP_TOKEN",
    "TAG_OF_A_LINE",
    "WRAPPED",
]

#: Tags of reasoning: DeepSeek, Qwen, GLM, MiniMax, Hunyuan and others (`think`), Claude (`thinking`), Gemma
#: and EXAONE (`thought`), Seed-OSS, LongCat.
_TAGS: Final = (
    r"(?:[a-z]{1,8}:)?(?:think|thinking|thoughts?|reasoning|scratchpad|inner_monologue|antthinking)"
    "|longcat_think"
)
#: Beginning and end of reasoning in the other families, in this order for each.
_PAIRS: Final = (
    (r"\[THINK\]", r"\[/THINK\]"),  # Magistral
    ("◁think▷", "◁/think▷"),  # Kimi VL
    (r"<\|channel>[ \t]*thoughts?\b", r"<channel\|>"),  # Gemma 4
    (r"<unused94>(?:thought\b)?", "<unused95>"),  # MedGemma
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),  # Command A
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),  # OpenThinker, Sky-T1
    (r"<\|open\|>think<\|sep\|>", r"(?:<\|close\|>think|<\|open\|>response)<\|sep\|>"),  # Kimi K3
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),  # Apertus
    (r"<\|think(?:ing)?(?:_start)?\|>", r"<\|/?(?:end_)?think(?:ing)?(?:_end)?\|>"),
)
_OPENING: Final = "|".join((rf"<(?:{_TAGS})(?:[ \t][^<>\n]{{0,80}})?>", *(opening for opening, _ in _PAIRS)))
_CLOSING: Final = "|".join((rf"<//?(?:{_TAGS})[ \t]*>", *(closing for _, closing in _PAIRS)))

#: Tokens that end an answer where the endpoint does not remove them.
_ENDS: Final = (
    r"<\|(?:im_end|im_start|im_user|im_assistant|endoftext|end_of_text|eot_id|eom_id|eot|eom|start_header_id"
    r"|header_start|end_of_turn|END_OF_TURN_TOKEN|END_RESPONSE|end_of_solution|end_of_role|endofassistant"
    r"|assistant_end|observation|user|return|end)\|>"
    r"|<\|close\|>(?:response|message)<\|sep\|>|</s>|<end_of_turn>|<eos>|<turn\|>|<end_of_utterance>|<end_code>"
    r"|\[/?INST\]|<\uff5c(?:end\u2581of\u2581sentence|User)\uff5c>|<\[?(?:EOS|PAD)\]?>|<SPECIAL_1[0-2]>"
    r"|\[UNUSED_TOKEN_14[56]\]|^###[ \t]{0,4}Human:"
)
STOP_TOKEN: Final = re.compile(_ENDS)
#: End of the code of agents that mark it by a tag, also one that a stop sequence cut.
CODE_END: Final = re.compile(rf"(?:</code>?|<end_code>?|{_ENDS})+[ \t]*$")

#: Finds, in one line, an opening (`open`) or closing (`close`) tag of reasoning or a stop token (`stop`).
#: Text in backticks and a tag in quotation marks (`quoted`) only mention them.
REASONING: Final = re.compile(
    r"(?P<quoted>(?<!`)`[^`\n]{1,200}`(?!`)|(?<!`)``[^`\n]{1,200}``(?!`)"
    rf"|[\"'\u201c\u2018\u300c](?:{_OPENING}|{_CLOSING}|{_ENDS})[\"'\u201d\u2019\u300d])"
    rf"|(?P<open>{_OPENING})|(?P<close>{_CLOSING})|(?P<stop>{_ENDS})",
    re.IGNORECASE,
)
#: What a chat template puts before an answer.
ROLE_HEADER: Final = re.compile(
    r"\s*+(?:<s>|<bos>|<\|begin_of_text\|>|<\uff5cbegin\u2581of\u2581sentence\uff5c>)?\s*+"
    r"(?:<\|im_start\|>assistant|<\|start_header_id\|>assistant<\|end_header_id\|>|<\|assistant\|>"
    r"|<\|im_assistant\|>assistant<\|im_middle\|>"
    r"|<\uff5cAssistant\uff5c>|<start_of_turn>model|<\|turn>model|<\|START_RESPONSE\|>|<\|START_OF_TURN_TOKEN\|>"
    r"<\|CHATBOT_TOKEN\|>)?\s*"
)
#: Tags around the answer itself: Hunyuan, Granite, and models that were trained to write them.
ANSWER_TAGS: Final = ("answer", "response", "final", "final_answer", "final_response")
_ANSWER: Final = "|".join(ANSWER_TAGS)
#: An answer that is wrapped as a whole, by such a tag, Command A, OpenThinker or Kimi K3.
WRAPPED: Final = re.compile(
    rf"\A\s*+(?:<(?:{_ANSWER})>|<\|begin_of_solution\|>|<\|START_RESPONSE\|>|<\|open\|>response<\|sep\|>)"
    rf"(?P<inner>.*?)(?:</(?:{_ANSWER})>\s*+)?\Z",
    re.DOTALL,
)

#: Control tokens of gpt-oss ("harmony").
HARMONY_TOKEN: Final = re.compile(r"<\|(?P<token>start|channel|message|constrain|end|return|call)\|>")
#: The same answer after its control tokens were dropped: names of channels stand before the texts.
NAKED_HARMONY: Final = re.compile(
    r"\s*(?:assistant)?analysis"
    r"(?:(?P<thought>.*?)assistant(?:final|(?=commentary to=))(?P<rest>.*)"
    r"|(?=[A-Z\"'\u4e00-\u9fff])(?P<only>.*))",
    re.DOTALL,
)
#: Reasoning and answer under headings of words: gpt-oss without the name of its first channel, Granite 3.2,
#: ReAct.
HEADED: Final = (
    re.compile(r"(?P<thought>.*?[^`\"'\w\s]\s{0,4})assistantfinal(?![ \t`\"'])(?P<rest>.*)", re.DOTALL),
    re.compile(
        r"\s*Here(?:'s| is) my thought process:(?P<thought>.*?)"
        r"(?:Here(?:'s| is) my response:(?P<rest>.*)|\Z)",
        re.DOTALL,
    ),
    re.compile(r"\s*Thoughts?:(?P<thought>.*?)\n[ \t]*Final Answer:(?P<rest>.*)", re.DOTALL),
)
#: Marks around the answer itself, which are left out: GLM-4.5V.
BOX: Final = re.compile(r"(?<![`\"'])<\|?(?:begin|end)_of_box\|?>")
#: An answer that is a formula in a box as a whole.
BOXED: Final = re.compile(
    r"\A[\s$]*+(?:\\[(\[])?\s*+\\boxed\{(?P<inner>[^{}\\]*+)\}[.\s$]*+(?:\\[)\]])?[.\s$]*+"
)

#: Labels of the blocks that models write calls in.
CALL_LABELS: Final = frozenset({"function_call", "tool_call", "tool_calls", "tool_code", "tool_use"})
#: Beginning of a call in the notation of a model's training. XML tags count where a call follows, because
#: a sentence may name them.
CALL_MARK: Final = re.compile(
    r"<(?:[a-z]{1,20}[:_])?(?:tool_?calls?|tool_use|tool_code|function_?calls?|call_record|invoke"
    r"|start_function_call|use_mcp_tool|attempt_completion|execute_\w{1,20})\b[^<>\n]{0,200}>"
    r"(?=[ \t]*(?:$|[\[{<]|[\w.]{1,100}(?:\(|$|<)))"
    r"|<function[= ][\w.:-]{1,100}"
    r"|<tool_name>[\w.:-]{1,100}</"
    r"|(?:<|^[ \t]{0,20})invoke\s{1,9}name=[\"']"
    r"|^[ \t]{0,20}<parameter[= ][\w.:\"'=-]{1,100}>"
    r"|<[|\uff5c\u2016]{1,2}(?:tool|function|python_tag|python_start|plugin|action_start|START_ACTION|DSML)"
    r"|<\|open\|>tools"
    r"|\]<\]minimax\[>\["
    r"|<tool_call\|>"
    r"|<\|channel\|>commentary to="
    r"|^[ \t]*commentary to="
    r"|(?:^|(?<=[ \t>]))to=functions\.\w"
    r"|\[TOOL_CALLS?\]|\[ARGS\]\s{0,4}\{|\[CALL_ID\]\w|\[Calling tool:|\[UNUSED_TOKEN_14[1-4]\]"
    r"|<arg_key>"
    r"|\u273fFUNCTION\u273f"
    r"|^[ \t]*functools\[\{"
    r"|^tool_code\n"
    r"|^[ \t]*Action:[^\n]{1,200}\n[ \t]*Action Input:",
    re.IGNORECASE | re.MULTILINE,
)
#: A tag that begins a line: agents of other kinds call a tool by one with its name.
TAG_OF_A_LINE: Final = re.compile(r"^[ \t]{0,20}<(?P<name>[A-Za-z_][\w.]{0,99})(?=[ \t/>])", re.MULTILINE)
