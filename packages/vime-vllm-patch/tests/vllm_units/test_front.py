# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: TID251
"""What a user touches: start-up refusals, request checks, the fields of every endpoint, outputs and their merging."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

REFUSED = {
    "prefix_caching": ({"enable_prefix_caching": False}, "requires prefix caching"),
    "pipeline": ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline parallelism"),
    "kv_connector": (
        {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
        "connector",
    ),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED.keys())
def test_start_up_refusals_name_the_reason(
    engine_config: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_config(**options)


def test_the_rust_front_end_is_refused(
    engine_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(
        ValueError, match="--enable-return-indexer-topk is incompatible with the Rust front end"
    ):
        engine_config()


def test_other_hardware_is_refused(
    engine_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    for name, text in (("is_rocm", "ROCm"), ("is_xpu", "XPU")):
        with monkeypatch.context() as patched:
            patched.setattr(type(current_platform), name, lambda self: True)
            with pytest.raises(ValueError, match=f"incompatible with {text}"):
                engine_config()


def test_a_model_without_an_indexer_is_refused(engine_config: Callable[..., Any], tmp_path: Path) -> None:
    dense = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(dense))
    with pytest.raises(ValueError, match="hf config has no index_topk"):
        engine_config(model=str(tmp_path))


def test_the_flag_is_an_argument_of_the_server(model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert not EngineArgs.from_cli_args(parser.parse_args([])).aux_output_config.enabled
    arguments = parser.parse_args(["--model", str(model), "--enable-return-indexer-topk"])
    assert EngineArgs.from_cli_args(arguments).aux_output_config.enable_return_indexer_topk


def test_the_channel_is_part_of_the_configurations_hash() -> None:
    from vllm.config.aux_output import AuxOutputConfig

    on, off = AuxOutputConfig(enable_return_indexer_topk=True), AuxOutputConfig()
    assert on.enabled
    assert not off.enabled
    assert on.compute_hash() != off.compute_hash()


@pytest.fixture
def checked(engine_config: Callable[..., Any]) -> Callable[..., None]:
    """Runs the request checks of the input processor on a 5-token prompt."""

    def check(enabled: bool, options: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine.input_processor import InputProcessor

        config = engine_config(enable_return_indexer_topk=enabled)
        processor = InputProcessor(config)
        prompt = {"type": "token", "prompt_token_ids": [1, 2, 3, 4, 5]}
        params = SamplingParams(max_tokens=1, detokenize=False, **options)
        processor.process_inputs("a", prompt, params, ("generate",))

    return check


BAD = {
    "negative": (True, {"indexer_topk_prompt_start": -1}, r"between 0 and the prompt length \(5\)"),
    "past_the_prompt": (True, {"indexer_topk_prompt_start": 6}, r"between 0 and the prompt length \(5\)"),
    "flag_off": (False, {"return_indexer_topk": True}, "requires a server started with"),
}


@pytest.mark.parametrize("enabled, options, message", BAD.values(), ids=BAD.keys())
def test_bad_requests_are_the_users_fault(
    checked: Callable[..., None], enabled: bool, options: dict[str, Any], message: str
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=message):
        checked(enabled, options)


@pytest.mark.parametrize(
    "enabled, options",
    [
        (True, {"indexer_topk_prompt_start": 5}),
        (True, {"return_indexer_topk": True}),
        (False, {"return_indexer_topk": False}),
        (False, {}),
    ],
    ids=["start_at_end", "on", "off", "default"],
)
def test_good_requests_pass(checked: Callable[..., None], enabled: bool, options: dict[str, Any]) -> None:
    checked(enabled, options)


def choice_of(name: str) -> Any:
    from importlib import import_module

    module, cls = name.rsplit(".", 1)
    return getattr(import_module(f"vllm.entrypoints.{module}"), cls)


CHOICES = {
    "generate": "scale_out.token_in_token_out.protocol.GenerateChoiceBase",
    "generate_stream": "scale_out.token_in_token_out.protocol.GenerateStreamChoiceBase",
    "completions": "openai.completion.protocol.CompletionResponseChoice",
    "chat": "openai.chat_completion.protocol.ChatCompletionResponseChoice",
}


@pytest.mark.parametrize("name", CHOICES.values(), ids=CHOICES.keys())
def test_every_choice_has_the_fields(name: str) -> None:
    fields = choice_of(name).model_fields
    for field in ("indexer_topk", "indexer_topk_layer_ids"):
        assert fields[field].default is None


@pytest.mark.parametrize("kind", ["completion", "chat_completion"])
def test_openai_requests_pass_the_options_on(kind: str) -> None:
    name = "CompletionRequest" if kind == "completion" else "ChatCompletionRequest"
    prompt = {"prompt": [1, 2]} if kind == "completion" else {"messages": [{"role": "user", "content": "x"}]}
    request = choice_of(f"openai.{kind}.protocol.{name}")(
        **prompt, model="m", indexer_topk_prompt_start=2, return_indexer_topk=False
    )
    params = request.to_sampling_params(4, {})
    assert (params.indexer_topk_prompt_start, params.return_indexer_topk) == (2, False)


def test_the_field_is_a_npy_file_with_the_layers_beside_it() -> None:
    from vllm.utils.indexer_topk import indexer_topk_fields

    hf = SimpleNamespace(model_type="deepseek_v32", num_hidden_layers=2, index_topk=3)
    picks = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    fields = indexer_topk_fields(SimpleNamespace(indexer_topk=picks), SimpleNamespace(hf_text_config=hf))
    assert fields["indexer_topk_layer_ids"] == [0, 1]
    read = np.load(io.BytesIO(base64.b64decode(fields["indexer_topk"])), allow_pickle=False)
    np.testing.assert_array_equal(read, picks)
    assert indexer_topk_fields(SimpleNamespace(indexer_topk=None), SimpleNamespace(hf_text_config=hf)) == {}


def test_the_new_field_of_the_engines_struct_is_the_last() -> None:
    from vllm.v1.engine import EngineCoreOutput

    assert [field.name for field in msgspec.structs.fields(EngineCoreOutput)][-1] == "indexer_topk"
    assert EngineCoreOutput("a", [1]).indexer_topk is None


def test_surplus_tokens_take_their_rows_along() -> None:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor

    rows = np.arange(24, dtype=np.uint16).reshape(4, 2, 3)
    output = EngineCoreOutput("a", [1, 2, 3, 4], indexer_topk=rows)
    state = SimpleNamespace(
        detokenizer=SimpleNamespace(num_output_tokens=lambda: 12),
        indexer_topk_chunks=[rows],
        routed_experts_chunks=[],
    )
    OutputProcessor._trim_surplus_tokens(state, output, 10)
    assert output.new_token_ids == [1, 2]
    np.testing.assert_array_equal(state.indexer_topk_chunks[-1], rows[:2])


def test_merged_outputs_keep_the_rows() -> None:
    from vllm.outputs import CompletionOutput, RequestOutput

    def part(**fields: Any) -> RequestOutput:
        done = CompletionOutput(0, "", [1], None, None, **fields)
        return RequestOutput("a", None, [1], None, [done], bool(fields))

    rows = np.zeros((1, 2, 3), np.int32)
    first = part()
    first.add(part(indexer_topk=rows), aggregate=True)
    assert first.outputs[0].indexer_topk is rows
    assert "indexer_topk=" in repr(first.outputs[0])
