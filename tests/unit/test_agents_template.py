"""The check of a chat template before a run with agents."""

import pytest
from agent_endpoints import CHATML, WEATHER, make_chat, make_tokenizer
from optional_packages import needs_vllm

from verl_like.trainer.ppo.agent_inputs import require_extendable

pytestmark = needs_vllm


def test_a_template_that_raises_an_error_for_a_tool_call_is_refused_with_what_to_set():
    """Mistral's do so for the ids of calls."""
    refusing = "{% if m.tool_calls %}{{ raise_exception('nine letters') }}{% endif %}{{ m.role }}"
    chat = make_chat(make_tokenizer(CHATML.replace("{{ m.role }}", refusing)))
    require_extendable(chat, [])
    with pytest.raises(ValueError, match=r"tool message \(nine letters\): set .*tokenizer_path"):
        require_extendable(chat, [WEATHER])
