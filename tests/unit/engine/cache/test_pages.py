"""Page bookkeeping against a naive model that knows what is written in every page."""

from __future__ import annotations

import random
import time

import pytest

from flashdraft.engine.cache.pages import NO_PAGE, PageBook, Pool

POOLS: dict[str, list[int | None]] = {
    "full": [None],
    "full+24": [None, 24],
    "full+16+40": [None, 16, 40],
    "24": [24],
}
CONFIGS = [(name, page_size) for name in POOLS for page_size in (4, 16)]
BLANK = -1


def make_book(windows: list[int | None], page_size: int, num_pages: int = 64) -> PageBook:
    return PageBook([Pool(num_pages, window) for window in windows], page_size)


def visible_from(window: int | None, position: int) -> int:
    """The first position that a token at `position` can see."""
    return 0 if window is None else max(0, position - window + 1)


class Model:
    """A PageBook, and beside it the content of every page and who published what.

    A token's keys and values depend on everything before it, so what is "written" for a token is a
    number that stands for the whole prefix up to it.
    """

    def __init__(self, book: PageBook) -> None:
        self.book = book
        pages = [pool.num_pages for pool in book.pools]
        self.content = [[[BLANK] * book.page_size for _ in range(n)] for n in pages]
        self.published: list[dict[int, int]] = [{} for _ in pages]  # page -> its last token's
        self.tokens: dict[str, list[int]] = {}
        self.written: dict[str, int] = {}
        self.num_hits = 0
        self.num_published: dict[str, int] = {}  # pages a sequence has offered so far

    def prefixes(self, tokens: list[int]) -> list[int]:
        value, values = 0, []
        for token in tokens:
            value = hash((value, token))
            values.append(value)
        return values

    def naive_hit(self, tokens: list[int]) -> int:
        size, values = self.book.page_size, self.prefixes(tokens)
        for length in range((len(tokens) - 1) // size * size, 0, -size):
            if all(
                values[page * size + size - 1] in self.published[i].values()
                for i, pool in enumerate(self.book.pools)
                for page in range(visible_from(pool.window, length) // size, length // size)
            ):
                return length
        return 0

    def open(self, owner: str, tokens: list[int]) -> int:
        expected = self.naive_hit(tokens)
        length = self.book.open(owner, tokens)
        assert length == expected
        self.num_hits += length > 0
        assert length < len(tokens), "no token is left to compute"
        self.tokens[owner], self.written[owner] = tokens, length
        self.num_published[owner] = length // self.book.page_size
        self.check_context(owner)
        return length

    def reserve(self, owner: str, length: int, window_length: int | None = None) -> bool:
        tables = [self.book.table(owner, i) for i in range(len(self.book.pools))]
        before = [list(table) for table in tables]
        available = [pool.num_available for pool in self.book.pools]
        done = self.book.reserve(owner, length, window_length)
        for i, table in enumerate(tables):
            wanted = length
            if window_length is not None and self.book.pools[i].window is not None:
                wanted = window_length
            assert list(table[: len(before[i])]) == before[i]
            needed = max(len(before[i]), -(-wanted // self.book.page_size))
            assert len(table) == (needed if done else len(before[i]))
            assert done or any(
                -(-length // self.book.page_size) - len(b) > a
                for b, a in zip(before, available, strict=True)
            ), "refused although there was room"
            for page in table[len(before[i]) :]:
                self.published[i].pop(page, None)
                self.content[i][page] = [BLANK] * self.book.page_size
        return done

    def write(self, owner: str, start: int, values: list[int]) -> None:
        size = self.book.page_size
        for i in range(len(self.book.pools)):
            table = self.book.table(owner, i)
            for place, value in enumerate(values, start):
                assert table[place // size] not in self.published[i], "wrote into a shared page"
                self.content[i][table[place // size]][place % size] = value

    def commit(self, owner: str, length: int, publish: bool = True) -> None:
        """Compute tokens up to `length`, for which there is room; cut, publish and recycle."""
        self.check_context(owner)
        values = self.prefixes(self.tokens[owner][:length])
        self.write(owner, self.written[owner], values[self.written[owner] :])
        self.written[owner] = length
        self.book.truncate(owner, length)
        if publish:
            self.publish(owner, values)
        self.book.check_integrity()
        self.book.recycle(owner, length)
        self.check_context(owner)

    def publish(self, owner: str, values: list[int]) -> None:
        size, first = self.book.page_size, self.num_published[owner]
        self.book.publish(owner, self.tokens[owner], len(values))
        self.num_published[owner] = len(values) // size
        for i, published in enumerate(self.published):
            for index in range(first, self.num_published[owner]):
                page, value = self.book.table(owner, i)[index], values[index * size + size - 1]
                if page != NO_PAGE and value not in published.values():
                    published[page] = value

    def check_context(self, owner: str) -> None:
        """The next token finds every earlier token that it can see, and it is the right one."""
        size, length = self.book.page_size, self.written[owner]
        values = self.prefixes(self.tokens[owner][:length])
        for i, pool in enumerate(self.book.pools):
            table = self.book.table(owner, i)
            for place in range(visible_from(pool.window, length), length):
                page = table[place // size]
                assert page != NO_PAGE and self.content[i][page][place % size] == values[place]

    def close(self, owner: str) -> None:
        self.book.close(owner)
        del self.tokens[owner], self.written[owner]


def random_step(model: Model, rng: random.Random, texts: list[list[int]]) -> None:
    """Do one random thing that the engine may do."""
    choice = rng.random()
    if choice < 0.25 and len(model.tokens) < 5:
        text = rng.choice(texts)
        tokens = text[: rng.randint(1, len(text))]
        tokens = tokens + [rng.randrange(3) for _ in range(rng.choice((0, 0, 1, 9)))]
        model.open(f"request {rng.random()}", tokens)
    elif not model.tokens:
        return
    elif choice < 0.35:
        model.close(rng.choice(list(model.tokens)))
    elif choice < 0.37:
        model.book.forget_cached()
        for i, published in enumerate(model.published):
            held = {p for owner in model.tokens for p in model.book.table(owner, i)}
            for page in published.keys() - held:
                del published[page]
    else:
        owner = rng.choice(list(model.tokens))
        tokens, done = model.tokens[owner], model.written[owner]
        if done < len(tokens) - 1:  # a prompt's chunk: all of it in the pools without a window
            count = rng.randint(1, len(tokens) - done)
            if model.reserve(owner, len(tokens), done + count):
                model.commit(owner, done + count, publish=rng.random() < 0.8)
        else:  # a decode step: drafts are written, some of them are kept
            room, kept = rng.randint(0, 7), rng.randint(0, 7)
            if model.reserve(owner, len(tokens) + room):
                model.write(owner, done, [BLANK] * (len(tokens) + room - done))
                tokens += [rng.randrange(3) for _ in range(min(room, kept))]
                model.commit(owner, len(tokens), publish=rng.random() < 0.8)
                tokens.append(rng.randrange(3))


@pytest.mark.parametrize(("pools", "page_size"), CONFIGS)
def test_random_traces_leak_nothing_and_hit_what_they_can(pools: str, page_size: int) -> None:
    num_hits = 0
    for seed in range(125):  # eight configurations: a thousand traces
        rng = random.Random(f"{pools} {page_size} {seed}")
        book = make_book(POOLS[pools], page_size, rng.choice((12, 24, 60)))
        model = Model(book)
        texts = [[rng.randrange(3) for _ in range(8 * page_size)] for _ in range(2)]
        for _ in range(40):
            random_step(model, rng, texts)
            book.check_integrity()
        for owner in list(model.tokens):
            model.close(owner)
            book.check_integrity()
        num_hits += model.num_hits
        assert [pool.num_available for pool in book.pools] == [p.num_pages for p in book.pools]
    assert num_hits > 50, "the traces share too little to mean anything"


def run(book: PageBook, owner: str, tokens: list[int]) -> int:
    """A whole request; it stays open. Returns the length of its hit."""
    length = book.open(owner, tokens)
    assert book.reserve(owner, len(tokens))
    book.publish(owner, tokens, len(tokens))
    book.recycle(owner, len(tokens))
    return length


def test_a_hit_leaves_at_least_one_token() -> None:
    book = make_book([None], 4)
    run(book, "a", list(range(16)))
    assert book.open("same", list(range(16))) == 12
    assert book.open("longer", list(range(17))) == 16
    assert book.open("page", list(range(4))) == 0
    assert book.open("one", [0]) == 0


def test_two_sequences_share_a_prefix_and_part_after_it() -> None:
    book = make_book([None], 4, num_pages=8)
    run(book, "a", list(range(12)))
    assert run(book, "b", [*range(9), 99, 98, 97, 96]) == 8
    assert list(book.table("a", 0)[:2]) == list(book.table("b", 0)[:2])
    assert book.table("a", 0)[2] != book.table("b", 0)[2]
    assert book.pools[0].num_available == 8 - 3 - 2
    book.close("a")
    assert book.pools[0].num_available == 8 - 4, "b still holds what it shares"
    book.check_integrity()


def test_the_same_content_computed_twice_is_kept_once() -> None:
    book, tokens = make_book([None], 4, num_pages=8), list(range(8))
    book.open("a", tokens)
    book.open("b", list(tokens))  # at the same time: neither finds the other
    for owner in ("a", "b"):
        assert book.reserve(owner, 8)
        book.publish(owner, tokens, 8)
        book.check_integrity()
    first = list(book.table("a", 0))
    book.close("a")
    book.close("b")
    book.check_integrity()
    assert book.open("c", [*tokens, 8]) == 8
    assert list(book.table("c", 0)) == first


def test_a_windowed_pool_needs_the_last_window_for_a_hit() -> None:
    book, tokens = make_book([None, 8], 4, num_pages=8), list(range(24))
    run(book, "a", tokens)
    assert list(book.table("a", 1)).count(NO_PAGE) == 4, "position 24 sees 17 and later"
    book.close("a")
    pool = book.pools[1]
    assert book.open("b", [*tokens, 24]) == 24
    book.close("b")
    while pool._page_of:  # take the windowed pages away one by one
        hit = book.open("c", [*tokens, 24])
        known = set(pool._page_of)
        digests = book._holdings["c"].digests
        first = max(0, hit - 8 + 1) // 4
        assert all(d in known for d in digests[first : hit // 4])
        book.close("c")
        pool._holders[pool.allocate()] = 0  # lost for good: blank and nobody's
    assert book.open("d", [*tokens, 24]) == 0, "the pool without a window is not enough"


def test_recycled_pages_are_used_again() -> None:
    book = PageBook([Pool(100, None), Pool(4, 8)], 4)
    tokens: list[int] = []
    book.open("a", [0])
    for length in range(1, 200):
        tokens.append(length)
        assert book.reserve("a", length), "a window of 8 in pages of 4 takes 4 pages at most"
        book.publish("a", tokens, length)
        book.recycle("a", length)
        book.check_integrity()


def test_published_pages_survive_until_room_is_needed_and_ends_go_first() -> None:
    book = make_book([None], 4, num_pages=8)
    old, new = list(range(16)), list(range(100, 116))
    for owner, tokens in (("old", old), ("new", new)):
        run(book, owner, tokens)
        book.close(owner)
    book.open("x", [7])
    for num_pages, old_hit, new_hit in [
        (0, 16, 16),
        (1, 12, 16),
        (3, 4, 16),
        (4, 0, 16),
        (5, 0, 12),
        (8, 0, 0),
    ]:
        assert book.reserve("x", 4 * num_pages)
        for tokens, hit in ((new, new_hit), (old, old_hit)):  # a look makes `old` the newest again
            digests: list[bytes] = []
            book._extend_digests(digests, tokens, 4)
            assert 4 * book._longest_hit(digests) == hit
        book.check_integrity()


def test_a_look_makes_a_prefix_the_last_to_be_forgotten() -> None:
    book = make_book([None], 4, num_pages=8)
    old, new = list(range(16)), list(range(100, 116))
    for owner, tokens in (("old", old), ("new", new)):
        run(book, owner, tokens)
        book.close(owner)
    assert book.open("again", [*old, 0]) == 16
    book.close("again")
    book.open("x", [7])
    assert book.reserve("x", 16)
    book.close("x")
    assert book.open("new", [*new, 0]) == 0
    assert book.open("old", [*old, 0]) == 16


def test_reserve_is_all_or_nothing_over_all_pools() -> None:
    book = PageBook([Pool(8, None), Pool(3, 8)], 4)
    book.open("a", [0])
    assert not book.reserve("a", 16), "the windowed pool has three pages"
    assert [len(book.table("a", i)) for i in (0, 1)] == [0, 0]
    assert book.reserve("a", 32, 12), "the whole prompt, and windowed room for its first chunk"
    assert [len(book.table("a", i)) for i in (0, 1)] == [8, 3]
    book.check_integrity()


def test_without_a_prefix_cache_nothing_is_found() -> None:
    book = PageBook([Pool(8, None)], 4, use_prefix_cache=False)
    assert run(book, "a", list(range(16))) == 0
    book.close("a")
    assert run(book, "a", list(range(17))) == 0
    book.check_integrity()


def test_there_is_no_way_back_behind_shared_pages_or_a_window_given_back() -> None:
    book, tokens = make_book([None, 8], 4), list(range(24))
    run(book, "a", tokens)
    with pytest.raises(AssertionError, match="shared"):
        book.truncate("a", 23)
    plain = PageBook([Pool(8, None), Pool(8, 8)], 4, use_prefix_cache=False)
    plain.open("a", tokens)
    assert plain.reserve("a", 24)
    plain.recycle("a", 24)
    plain.truncate("a", 24)
    with pytest.raises(AssertionError, match="window"):
        plain.truncate("a", 20)


def test_check_integrity_can_fail() -> None:
    book = make_book([None], 4)
    run(book, "a", list(range(8)))
    book.pools[0]._free.pop()
    with pytest.raises(AssertionError, match="leaked"):
        book.check_integrity()


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_long_waiting_prompt_is_cheap_to_try_again(is_cached: bool) -> None:
    rng, book = random.Random(0), make_book([None, 1024], 16, num_pages=6400)
    tokens = [rng.randrange(50_000) for _ in range(100_000)]
    if is_cached:
        run(book, "a", list(tokens))
        book.close("a")
    times = []
    for _ in range(5):
        begin = time.process_time()
        book.open("waiting", tokens)
        assert not book.reserve("waiting", 200_000)
        book.close("waiting")
        times.append(time.process_time() - begin)
    book.check_integrity()
    assert min(times[1:]) < 0.02, "a few milliseconds; hashing it anew takes several times that"
