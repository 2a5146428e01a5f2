"""Generates text token by token with transformers' `generate` and its KV cache, and evaluates a model on tasks of lm-eval."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from sley_core.errors import PluginError, UsageError, install_hint


class Generator:
    """A transformers model that continues prompts, on CUDA if it is available. folder: contains `config.json`, and optionally a
    tokenizer and weights, as `train-cli export` writes them. state: the weights, keyed by transformers' names; None reads them
    from the folder. stop: token ids that end a text, in addition to the ids in the folder. tokenizer: the tokenizer in the
    folder, or None. max_length: the maximum number of positions, or None if it is unknown.
    """

    def __init__(self, folder: Path, state: Mapping[str, torch.Tensor] | None = None, stop: Sequence[int] = ()) -> None:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        config = AutoConfig.from_pretrained(folder)
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model_class.from_pretrained(
            folder if state is None else None,
            config=config,
            dtype=config.dtype,
            **({} if state is None else {"state_dict": dict(state)}),
        )
        self.model.to(device).eval()
        ends: Any = config.eos_token_id
        if (folder / "generation_config.json").is_file():
            ends = GenerationConfig.from_pretrained(folder).eos_token_id
        self.model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # without the folder's options
        self.tokenizer: Any = None
        # For some models, AutoTokenizer would choose a class that splits text differently.
        if (folder / "tokenizer.json").is_file():
            self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        elif (folder / "tokenizer_config.json").is_file():
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
        ids_or_none = [*(ends if isinstance(ends, list) else [ends]), getattr(self.tokenizer, "eos_token_id", None), *stop]
        self.stop_ids = sorted({token for token in ids_or_none if token is not None})
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the token ids of a conversation and the start of an answer. Raises UsageError "chat-template" if the model
        has no chat template, or if the template refuses `messages`, which are dicts with "role" and "content".
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            hint = "use a run that was trained with `data.chat`, or a model whose tokenizer has a template"
            raise UsageError("chat-template", "the model has no chat template", hint=hint)
        try:
            text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template may raise anything
            raise UsageError("chat-template", f"the chat template refuses the messages: {error}") from None
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def generate(
        self, prompts: Sequence[Sequence[int]], *, tokens: int, temperature: float, top_k: int | None, seed: int
    ) -> Iterator[list[int | None]]:
        """Yields the next token id of each prompt, until all texts have ended or have `tokens` new ids. Yields None for a text
        that has ended, also in place of the id that ends it. Closing the iterator stops the generation. prompts: lists of token
        ids. temperature: 0 selects the most likely id. top_k: the number of most likely ids to sample from; None for all. seed:
        the seed of torch's global generators.
        """
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options: dict[str, Any] = {"do_sample": temperature > 0, "repetition_penalty": 1.0, "max_new_tokens": tokens}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0}
        if self.stop_ids:
            options |= {"eos_token_id": self.stop_ids}
        queue: SimpleQueue[Any] = SimpleQueue()
        cancelled = Event()

        def run() -> None:
            try:
                torch.manual_seed(seed)
                self.model.generate(
                    input_ids=ids.to(self.model.device),
                    attention_mask=mask.to(self.model.device),
                    pad_token_id=self.stop_ids[0] if self.stop_ids else 0,
                    streamer=_Streamer(queue, cancelled),
                    **options,
                )
            except BaseException as error:
                queue.put(error)
            queue.put(None)

        thread = Thread(target=run, daemon=True)
        thread.start()
        ended = [False] * len(prompts)
        try:
            while (item := queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                ended = [has_ended or token in self.stop_ids for has_ended, token in zip(ended, item, strict=True)]
                yield [None if has_ended else token for has_ended, token in zip(ended, item, strict=True)]
        finally:
            cancelled.set()
            thread.join()


class _Streamer(BaseStreamer):
    """Puts the new ids of each step of transformers' `generate` into a queue. Setting `cancelled` ends the generation."""

    def __init__(self, queue: SimpleQueue[Any], cancelled: Event) -> None:
        self._queue = queue
        self._cancelled = cancelled
        self._has_prompts = False

    def put(self, value: torch.Tensor) -> None:
        """Queues the ids `value`, one per text. Ignores the prompts in the first call. Raises InterruptedError if cancelled."""
        if self._cancelled.is_set():
            raise InterruptedError
        if self._has_prompts:
            self._queue.put(value.flatten().tolist())
        self._has_prompts = True

    def end(self) -> None:
        """Does nothing, since `Generator.generate` ends the queue."""


def evaluate_tasks(generator: Generator, names: Sequence[str], include: Path | None) -> dict[str, dict[str, float]]:
    """Returns the metrics of each task, such as `{"mine": {"acc,none": 0.5}}`, as lm-eval computes them with its class `HFLM`.
    names: names of tasks or groups, or patterns for names. include: a folder with tasks in lm-eval's format, which replace
    lm-eval's own tasks, or None. Raises PluginError "plugin-import" if lm-eval cannot be imported, UsageError "no-vocabulary"
    if the model has no tokenizer, and UsageError "harness-task" for a name without a task.
    """
    try:
        from lm_eval import simple_evaluate  # type: ignore[import-not-found, unused-ignore]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found, unused-ignore]
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        hint = install_hint("hf", "eval")
        raise PluginError("plugin-import", f"`--harness` needs lm-eval: {error}", hint=hint) from error
    if generator.tokenizer is None:
        message = "lm-eval needs a Hugging Face tokenizer, but this model has none"
        raise UsageError("no-vocabulary", message, hint="train with a Hugging Face tokenizer (`[data] tokenizer`)")
    manager = TaskManager(include_path=include, include_defaults=include is None)
    for name in names:
        if not manager.match_tasks([name]):
            place = "lm-eval" if include is None else f"`{include}`"
            hint = "`lm-eval ls tasks` lists lm-eval's tasks, and `--include DIR` uses the tasks in a folder"
            raise UsageError("harness-task", f"{place} has no task `{name}`", hint=hint)
    model = HFLM(pretrained=generator.model, tokenizer=generator.tokenizer)
    results: Any = simple_evaluate(model, tasks=list(names), task_manager=manager, log_samples=False, bootstrap_iters=0)
    return {
        task: {name: float(value) for name, value in values.items() if isinstance(value, float) and "_stderr" not in name}
        for task, values in results["results"].items()
    }
