"""What those who come from vLLM, llama-cpp-python or transformers type, and what to type here.

One table: docs/python.md shows it, and what is raised where such a word is met quotes it. Words
that mean the same here (`sampling_params=`, `n`, `use_tqdm`) just work and are not in it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from flashdraft.errors import UnknownWordError, did_you_mean, quoted

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)

_CHAT = "llm.chat(messages).text"
_NO_MATTER = "leave it out: there is nothing to choose"
_NO_VECTORS = "flashdraft only writes text: there are no embeddings, scores or classes"
_GRAMMAR = "generate(…, grammar=GrammarSpec.json(schema)), or .regex, .choice, .lark"
_EVENTS = "async for event in llm.stream(…); leaving the loop cancels the request"
_PICTURES = 'pictures are parts of a message: {"type": "image", "image": …}'
_OWN_SIGHT = "leave it out: the model's own files say what it sees with"
_FIRST = 'the first argument: LLM("org/name"), a folder or a .gguf file'

# Where a word is typed -> the word -> what to type here.
HABITS: Mapping[str, Mapping[str, str]] = {
    "from flashdraft import …": {
        "Llama": "from flashdraft import LLM; LLM(\"org/name\"), a folder or a .gguf file",
        "EngineArgs": "LLM(…) takes everything itself",
        "AsyncEngineArgs": "AsyncLLM(…) takes everything itself",
        "LLMEngine": "from flashdraft import LLM",
        "AsyncLLMEngine": "from flashdraft import AsyncLLM",
        "RequestOutput": "Generation is the result; its text is .text",
        "CompletionOutput": "Generation is the result; its text is .text",
        "StructuredOutputsParams": "GrammarSpec.json(schema), .regex, .choice or .lark",
        "GuidedDecodingParams": "GrammarSpec.json(schema), .regex, .choice or .lark",
        "LlamaGrammar": "GrammarSpec.lark(text), in Lark's notation",
        "TextPrompt": "a prompt is text",
        "TokensPrompt": "a prompt is a list of token ids",
    },
    "LLM(…)": {
        "tensor_parallel_size": "one GPU is used; for more: flashdraft serve --engine vllm",
        "pipeline_parallel_size": "one GPU is used; for more: flashdraft serve --engine vllm",
        "data_parallel_size": "one GPU is used; for more: flashdraft serve --engine vllm",
        "split_mode": "one GPU is used; for more: flashdraft serve --engine vllm",
        "tensor_split": "one GPU is used; for more: flashdraft serve --engine vllm",
        "main_gpu": "device=\"cuda:0\"",
        "gpu_memory_utilization": "cache_gb=, gigabytes for keys and values beside the weights",
        "cpu_offload_gb": "weights are on one device; quantize= makes them smaller",
        "swap_space": "leave it out: requests that give way are computed again",
        "block_size": _NO_MATTER,
        "max_model_len": "max_context=",
        "n_ctx": "max_context=",
        "max_num_seqs": "max_batch=",
        "max_num_batched_tokens": _NO_MATTER,
        "n_batch": _NO_MATTER,
        "enable_chunked_prefill": "leave it out: it is always on",
        "enable_prefix_caching": "leave it out: it is always on",
        "enforce_eager": _NO_MATTER,
        "disable_log_stats": "leave it out: every Generation has its .stats",
        "trust_remote_code": "leave it out: no code from a model repository is ever run",
        "quantization": "quantize=\"int4\", \"int8\" or \"fp8\"; stored few bits stay so",
        "kv_cache_dtype": "kv_dtype=\"fp8\"",
        "speculative_config": "draft=, a drafter; \"auto\" finds the model's own",
        "draft_model": "draft=, a drafter; \"auto\" finds the model's own",
        "torch_dtype": "dtype=",
        "device_map": "device=\"cuda\" or \"cpu\"",
        "n_gpu_layers": "device=\"cuda\" or \"cpu\": all layers are on one device",
        "n_threads": "the environment variable OMP_NUM_THREADS, before Python starts",
        "tokenizer": "leave it out: the model's own is read",
        "tokenizer_mode": "leave it out: the model's own is read",
        "skip_tokenizer_init": "leave it out; prompts may be token ids",
        "revision": "a folder that has the files of that revision",
        "download_dir": "the environment variable HF_HOME",
        "load_format": "leave it out: the files tell",
        "hf_token": "the environment variable HF_TOKEN",
        "enable_lora": "lora=…, the folder of one adapter, merged as the model is loaded",
        "seed": "SamplingParams(seed=…)",
        "chat_format": "leave it out: the model's own template is used",
        "model_path": _FIRST,
        "pretrained_model_name_or_path": _FIRST,
        "repo_id": _FIRST,
        "filename": _FIRST,
        "limit_mm_per_prompt": "leave it out; vision=False leaves out the part that sees pictures",
        "language_model_only": "vision=False",
        "mm_processor_kwargs": "\"max_soft_tokens\": 560 in a picture's part of a message",
        "allowed_local_media_path": "leave it out: who calls from Python may name any file",
        "clip_model_path": "mmproj=; leave it out where the file lies beside the model's",
        "chat_handler": _OWN_SIGHT,
        "logits_all": "SamplingParams(prompt_logprobs=0)",
        "embedding": _NO_VECTORS,
        "verbose": "leave it out: nothing is printed",
    },
    "SamplingParams(…)": {
        "best_of": "n=, and choose from the answers yourself",
        "use_beam_search": "answers are drawn, not searched for; n= gives several",
        "num_beams": "answers are drawn, not searched for; n= gives several",
        "length_penalty": "answers are drawn, not searched for; min_tokens= keeps them long",
        "early_stopping": "answers are drawn, not searched for; stop= ends them",
        "max_new_tokens": "max_tokens=",
        "num_return_sequences": "n=",
        "do_sample": "temperature=; 0, the default, is greedy",
        "repeat_penalty": "repetition_penalty=",
        "typical_p": "top_p= or min_p=",
        "mirostat_mode": "top_p= or min_p=",
        "eos_token_id": "stop_token_ids=",
        "bad_words": "logit_bias={token_id: -100}",
        "allowed_token_ids": "logit_bias=, or a grammar: " + _GRAMMAR,
        "logits_processors": "logit_bias=, or a grammar: " + _GRAMMAR,
        "logits_processor": "logit_bias=, or a grammar: " + _GRAMMAR,
        "structured_outputs": _GRAMMAR,
        "guided_decoding": _GRAMMAR,
        "guided_json": _GRAMMAR,
        "guided_regex": _GRAMMAR,
        "guided_choice": _GRAMMAR,
        "guided_grammar": _GRAMMAR,
        "response_format": _GRAMMAR,
        "detokenize": "leave it out: .text and .token_ids are both there",
        "skip_special_tokens": "leave it out: .text has no special tokens, .token_ids have them",
        "spaces_between_special_tokens": "leave it out: .text has no special tokens",
        "include_stop_str_in_output": "leave it out: .text ends before the stop string",
        "truncate_prompt_tokens": "cut the list of token ids before you send it",
        "output_kind": "generate(…) for whole answers, stream(…) for pieces",
    },
    "generate(…), chat(…), stream(…)": {
        "prompt_token_ids": "the first argument: a list of token ids, or a list of such lists",
        "request_id": "leave it out; to cancel, leave the loop over stream(…)",
        "lora_request": "LLM(…, lora=…): one adapter for all requests",
        "priority": "leave it out: requests are served in order",
        "stream": "llm.stream(…)",
        "echo": "put the prompt before .text yourself",
        "suffix": "put it behind .text yourself; models fill no gaps here",
        "chat_template": "leave it out: the model's own template is used",
        "chat_template_content_format": "leave it out: the model's own template is used",
        "add_generation_prompt": "leave it out: the answer's turn is begun",
        "continue_final_message": "generate(llm.chat_prompt(messages) + the ids of its beginning)",
        "enable_thinking": "chat_template_kwargs={\"enable_thinking\": True}",
        "parallel_tool_calls": "leave it out: all calls are in .calls",
        "functions": "tools=[{\"type\": \"function\", \"function\": …}]",
        "schema": "grammar=GrammarSpec.json(schema)",
        "response_format": "grammar=GrammarSpec.json(schema)",
        "guided_options_request": "grammar=GrammarSpec.json(schema)",
        "images": "chat(messages): " + _PICTURES,
        "multi_modal_data": "chat(messages): " + _PICTURES,
        "mm_processor_kwargs": "\"max_soft_tokens\": 560 in a picture's part of a message",
        "system": "a first message: {\"role\": \"system\", \"content\": …}",
    },
    "llm.…": {
        "(…)": "llm.generate(prompt)[0].text",
        "create_chat_completion": _CHAT,
        "create_completion": "llm.generate(prompt)[0].text",
        "chat_completion": _CHAT,
        "tokenize": "llm.get_tokenizer().encode(text)",
        "detokenize": "llm.get_tokenizer().decode(token_ids)",
        "llm_engine": "llm.engine",
        "set_tokenizer": "the model's own tokenizer is used",
        "get_default_sampling_params": "llm.generation_config, what the model's makers advise",
        "shutdown": "llm.close()",
        "abort": _EVENTS,
        "add_request": "llm.generate(…) from any thread, or AsyncLLM",
        "from_engine_args": "AsyncLLM(model, …)",
        "from_pretrained": "LLM(\"org/name\"), a folder or a .gguf file",
        "beam_search": "answers are drawn, not searched for; SamplingParams(n=…) gives several",
        "embed": _NO_VECTORS,
        "create_embedding": _NO_VECTORS,
        "encode": _NO_VECTORS,
        "score": _NO_VECTORS,
        "classify": _NO_VECTORS,
        "reward": _NO_VECTORS,
    },
    "llm.get_tokenizer().…": {
        "(…)": "encode(text)",
        "apply_chat_template": "llm.chat(messages), or llm.chat_prompt(messages) for token ids",
        "batch_decode": "decode(ids) of each",
        "convert_tokens_to_ids": "token_id(token)",
        "eos_token_id": "eos_id",
        "bos_token_id": "bos_id",
    },
    "generation.…": {
        "[…]": "its parts are attributes: .text",
        "outputs": ".text, and .others for the answers 2 to n",
        "choices": ".text, and .others for the answers 2 to n",
        "message": ".content, .reasoning and .calls",
        "tool_calls": ".calls",
        "reasoning_content": ".reasoning",
        "usage": ".stats.prompt_tokens, and len(.token_ids)",
        "metrics": ".stats",
        "num_cached_tokens": ".stats.cached_tokens",
        "stop_reason": ".finish_reason",
        "cumulative_logprob": "sum(one.logprob for one in .logprobs)",
        "prompt": "the prompt that you sent: results are in the order of prompts",
        "prompt_token_ids": "the prompt that you sent: results are in the order of prompts",
        "request_id": "results are in the order of prompts",
        "finished": ".finish_reason; a Generation is always finished",
    },
}  # fmt: skip


def explained(
    place: str, name: str, more: Iterable[str] = ()
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """A function that says of keywords it does not have what to type instead.

    Without a name it is what its first argument is made with. `more` are words of SamplingParams,
    which belong into one.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        known = inspect.signature(function).parameters.keys() - {"self"}

        @functools.wraps(function)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            for word in kwargs.keys() - known:
                said = name or type(args[0]).__name__
                raise UnknownWordError(_unknown(place, said, word, known, more))
            return function(*args, **kwargs)

        return call

    return decorate


def explained_class(place: str) -> Callable[[_Class], _Class]:
    """The same for what a class is made with."""

    def decorate(made: _Class) -> _Class:
        setattr(made, "__init__", explained(place, "")(vars(made)["__init__"]))  # noqa: B010
        return made

    return decorate


def _unknown(place: str, name: str, word: str, known: Iterable[str], more: Iterable[str]) -> str:
    said = f"{name}(…) has no {word}"
    if (instead := HABITS[place].get(word)) is not None:
        return f"{said}; here: {instead}."
    if word in more:
        return f"{said}; here: {name}(…, SamplingParams({word}=…))."
    return f"{said}.{did_you_mean(word, known)}"


def import_hint(word: str) -> str | None:
    """What to import instead; None for a word that nobody is known to type."""
    instead = HABITS["from flashdraft import …"].get(word)
    return None if instead is None else f"flashdraft has no {word}; here: {instead}."


class Explains:
    """An object that says of what it does not have what to type instead."""

    _habits: ClassVar[str]

    if not TYPE_CHECKING:  # a type checker would take every misspelt name for an attribute

        def __getattr__(self, name: str) -> Any:
            instead = HABITS[type(self)._habits].get(name)
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(said if instead is None else f"{said}; here: {instead}.")


class ExplainsCalls(Explains):
    """One that is often taken for a function."""

    if not TYPE_CHECKING:

        def __call__(self, *args: object, **kwargs: object) -> Any:
            instead = HABITS[type(self)._habits]["(…)"]
            raise UnknownWordError(f"{type(self).__name__} is no function; here: {instead}.")


class ExplainsItems(Explains):
    """One that is often taken for a dictionary."""

    if not TYPE_CHECKING:

        def __getitem__(self, key: object) -> Any:
            instead = HABITS[type(self)._habits]["[…]"]
            raise UnknownWordError(f"{type(self).__name__} has no {quoted(key)}: {instead}.")
