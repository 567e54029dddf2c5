"""One model used through several objects, and from several threads, at once."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from langchain_ragkv import ChatRagKV
from threads import each_in_a_thread
from tiny import saved, some_chunks, tiny_model, tiny_tokenizer
from transformers import AttentionInterface, LlamaForCausalLM, PreTrainedModel, pipeline

from ragkv import RagKV, ReuseConfig
from ragkv.attend.attention import last_row_ends, subset_attention
from ragkv.errors import ModelInUseError
from ragkv.model.calls import cache_argument, cache_in
from ragkv.model.lock import lock_of

FIRST = ReuseConfig(history=False)  # each prompt is answered as if it were the first
CHUNKS = some_chunks(4, 60)
PROMPTS = ["\n\n".join(CHUNKS[i:] + CHUNKS[:i]) + f"\n\nQuestion {i}?" for i in range(4)]


def all_at_once(ways: dict[str, Callable[[str], object]], times: int = 2) -> None:
    """Ask in every way in a thread of its own and compare with what each says alone."""
    alone = {name: [ask(prompt) for prompt in PROMPTS] for name, ask in ways.items()}
    wrong: list[object] = []

    def work(name: str) -> None:
        for _ in range(times):
            try:
                if [ways[name](prompt) for prompt in PROMPTS] != alone[name]:
                    wrong.append(f"{name}: another answer")
            except Exception as error:  # noqa: BLE001  told below
                wrong.append(repr(error))

    each_in_a_thread(work, ways)
    assert wrong == []


@pytest.mark.parametrize("again", ["the model", "what was loaded"])
def test_two_engines_over_one_model(again):
    with ExitStack() as stack:
        one = stack.enter_context(
            RagKV(tiny_model(), tiny_tokenizer(), store=":memory:", reuse=FIRST)
        )
        given = (one.loaded,) if again == "what was loaded" else (one.loaded.model, one.tokenizer)
        two = stack.enter_context(RagKV(*given, store=":memory:", reuse=FIRST))
        for engine in (one, two):
            engine.precompute(CHUNKS)
        all_at_once(
            {
                "one": lambda prompt: one.generate(prompt, max_new_tokens=6).token_ids,
                "two": lambda prompt: (
                    two.generate(prompt, max_new_tokens=6, recompute_ratio=0.5).token_ids
                ),
            }
        )
        assert one.loaded.model.config._attn_implementation == "sdpa"


def test_two_models_that_share_their_configuration_take_turns():
    """A pass switches the configuration."""
    model = tiny_model()
    beside = LlamaForCausalLM(model.config)
    assert beside.config is model.config
    assert lock_of(beside) is lock_of(model)
    assert lock_of(tiny_model()) is not lock_of(model)


def test_engines_that_are_one_anothers_auxiliary_do_not_wait_for_ever(tmp_path):
    for family in ("llama", "qwen2"):
        saved(tmp_path / family, family)
    with ExitStack() as stack:
        ways: dict[str, Callable[[str], object]] = {}
        for main, auxiliary in (("llama", "qwen2"), ("qwen2", "llama")):
            engine = stack.enter_context(RagKV(tmp_path / main, store=":memory:", reuse=FIRST))
            settings = {"method": "cacheclip", "auxiliary_model": str(tmp_path / auxiliary)}
            engine.precompute(CHUNKS, **settings)
            ways[main] = partial(ids_of, engine, settings)
        all_at_once(ways, times=1)


def ids_of(engine: RagKV, settings: dict[str, str], prompt: str) -> list[int]:
    return engine.generate(prompt, max_new_tokens=3, **settings).token_ids


@pytest.fixture
def chats() -> Iterator[Callable[[str], ChatRagKV]]:
    model, made = tiny_model(), []

    def chat(namespace: str = "default") -> ChatRagKV:
        kv = RagKV(model, tiny_tokenizer(), store=":memory:", reuse=FIRST, namespace=namespace)
        kv.precompute(CHUNKS)
        made.append(kv)
        return ChatRagKV(kv=kv, max_tokens=6)

    yield chat
    for kv in made:
        kv.close()
    assert model.config._attn_implementation == "sdpa"


def test_two_chat_models_over_one_model(chats):
    named = {name: chats(name) for name in "ab"}
    all_at_once({name: lambda p, c=chat: c.invoke(p).content for name, chat in named.items()})


def test_the_ordinary_chat_model_beside_ours(chats):
    ours = chats()
    settings = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    made = pipeline("text-generation", ours.kv.loaded.model, tokenizer=tiny_tokenizer(), **settings)
    chat = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=made), tokenizer=tiny_tokenizer())
    all_at_once(
        {
            "ours": lambda prompt: ours.invoke(prompt).content,
            "ordinary": lambda prompt: chat.invoke(prompt).content,
        }
    )


# ---- an ordinary call, and ragkv's pass, at every moment of the other


@contextmanager
def switched_at(model: PreTrainedModel, first: int, last: int) -> Iterator[None]:
    """Have ragkv's pass in another thread while layers ``first`` to ``last - 1`` run here."""
    stack, steps = ExitStack(), {first: threading.Event(), last: threading.Event()}
    done = {at: threading.Event() for at in steps}

    def passing() -> None:
        assert steps[first].wait(30)
        with subset_attention(model), last_row_ends(model):
            done[first].set()
            assert steps[last].wait(30)
        done[last].set()

    def at(place: int) -> None:
        if place in steps:
            steps[place].set()
            assert done[place].wait(30)

    other = threading.Thread(target=passing, daemon=True)
    other.start()
    with stack:
        stack.callback(other.join)
        stack.callback(lambda: [step.set() for step in steps.values()])
        at(-1)  # before the masks are made
        for place, layer in enumerate(model.model.layers):
            hook = layer.register_forward_pre_hook(lambda *_, place=place: at(place))
            stack.callback(hook.remove)
        yield
        at(len(model.model.layers))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-window"])
@pytest.mark.parametrize(("first", "last"), [(-1, 4), (-1, 2), (2, 4), (1, 3)])
def test_an_ordinary_call_is_the_same_beside_a_pass(family, attention, first, last):
    model = tiny_model(family, attention)
    ids = torch.randint(2, 600, (2, 90))
    seen = torch.ones_like(ids)
    seen[0, :30] = 0  # padded on the left

    @torch.no_grad()
    def logits():
        """In two calls, the second over a cache."""
        one = model(input_ids=ids[:, :40], attention_mask=seen[:, :40], use_cache=True)
        two = model(
            input_ids=ids[:, 40:], attention_mask=seen, **cache_argument(model, cache_in(one))
        )
        return two.logits

    alone = logits()
    found = []

    @torch.no_grad()
    def beside():
        one = model(input_ids=ids[:, :40], attention_mask=seen[:, :40], use_cache=True)
        with switched_at(model, first, last):
            two = model(
                input_ids=ids[:, 40:], attention_mask=seen, **cache_argument(model, cache_in(one))
            )
        found.append(two.logits)

    beside()
    assert torch.equal(found[0], alone)
    assert model.config._attn_implementation == attention


def test_where_the_right_mask_is_unknown_an_ordinary_call_is_refused():
    model = tiny_model()
    AttentionInterface.register("mine", AttentionInterface()["sdpa"])
    model.config._attn_implementation = "mine"
    ids = torch.randint(2, 600, (1, 20))
    for first in (-1, 2):
        with pytest.raises(ModelInUseError, match="sdpa"), switched_at(model, first, 4):
            model(input_ids=ids)
    with RagKV(model, tiny_tokenizer(), store=":memory:", reuse=FIRST) as engine:  # ours are served
        engine.precompute(CHUNKS)
        assert engine.generate(PROMPTS[0], max_new_tokens=2).report.tokens.reused > 100


def test_ingestions_yield_the_model_to_requests_and_to_one_another():
    """An ordinary call of a request is served between their layers, with any attention."""
    model = tiny_model()
    AttentionInterface.register("mine", AttentionInterface()["sdpa"])
    model.config._attn_implementation = "mine"
    errors: list[Exception] = []
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:

        def work(number: int) -> None:
            try:
                if number < 2:
                    texts = [f"{number} {chunk}" for chunk in some_chunks(12, 40)]
                    engine.precompute(texts, neighbours=True)
                for chunk in some_chunks(12, 40):
                    engine.generate(f"{number}: {chunk}", max_new_tokens=2)
            except Exception as error:  # noqa: BLE001  compared below
                errors.append(error)

        each_in_a_thread(work, range(5))
        assert errors == []
        assert model.config._attn_implementation == "mine"


def test_seeded_answers_are_the_same_beside_others():
    """torch's own generators are the process's: two models would draw from the same."""
    engines = [
        RagKV(tiny_model(seed=i), tiny_tokenizer(), store=":memory:", reuse=FIRST) for i in range(2)
    ]
    settings = {"temperature": 1.5, "max_new_tokens": 12}
    for engine in engines:
        engine.loaded.model.generation_config.eos_token_id = None
    alone = [engine.generate(PROMPTS[0], seed=7, **settings).token_ids for engine in engines]
    wrong: list[int] = []

    def draw(which):
        for _ in range(3):
            seed = {"seed": 7} if which < 2 else {}  # others draw without one
            found = engines[which % 2].generate(PROMPTS[0], **seed, **settings).token_ids
            if which < 2 and found != alone[which]:
                wrong.append(which)

    each_in_a_thread(draw, range(4))
    assert wrong == []
    assert alone[0] != alone[1]
    for engine in engines:
        engine.close()


def test_models_that_share_a_configuration_draw_their_own_answers():
    first = tiny_model()
    second = type(first)(first.config).eval()
    engines = [RagKV(each, tiny_tokenizer(), store=":memory:") for each in (first, second)]
    alone = [kv.generate("Read this.", max_new_tokens=12, ignore_eos=True) for kv in engines]
    start = threading.Barrier(2)

    def answer(kv):
        start.wait()
        return kv.generate("Read this.", max_new_tokens=12, ignore_eos=True).token_ids

    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(answer, engines)) == [each.token_ids for each in alone]
    for kv in engines:
        kv.close()
