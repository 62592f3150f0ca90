"""The coefficients that a price is made of: where they go, how fast, and what stands in for what is not known. That
prices take them up is tried in test_policy.py and test_cluster_view.py."""

from collections.abc import Iterable
from random import Random
from statistics import median

import pytest

from engine.messages import Load, RequestStats
from router.core.fitting import (
    ALIKE,
    ASSUMED_ANSWER_TOKENS,
    ASSUMED_ROWS,
    FACTOR_STEP,
    FEWEST_REPORTS,
    MOST,
    MOST_ANSWER_TOKENS,
    NEWEST,
    ROW_STEP,
    ROWS_AT_LEAST,
    Coefficients,
    PredictionFactor,
    StepLine,
)
from tests.router.fake_cluster import load


def cluster() -> Coefficients:
    """Two prefill and two decode workers, the second of each on another host."""
    fitted = Coefficients()
    for number in (0, 1):
        fitted.joined(f"p{number}", "prefill", f"host {number}")
        fitted.joined(f"d{number}", "decode", f"host {number}")
    return fitted


def account(
    prefill: str = "p0", decode: str = "d0", output: int = 8, prompt: int = 0, cached: int = 0, **stages: float
) -> RequestStats:
    return RequestStats(
        prefill_worker=prefill,
        decode_worker=decode,
        output_tokens=output,
        prompt_tokens=prompt,
        prefill_cached_tokens=cached,
        stages=stages,
    )


@pytest.mark.parametrize("slower", [0.25, 1.7, 6.0])
def test_a_factor_comes_to_what_is_observed(slower: float) -> None:
    factor, random = PredictionFactor(), Random(1)
    assert not factor.is_known and factor.value == 1.0
    for _ in range(400):
        predicted_s = random.random()
        factor.observed(predicted_s, predicted_s * slower * random.uniform(0.8, 1.2))
    assert factor.value == pytest.approx(slower, rel=0.1)


def test_no_observation_moves_a_factor_far() -> None:
    """Guards prices against one request that a pause of the machine has made a thousand times slower."""
    factor, before = PredictionFactor(), 1.0
    for _ in range(100):
        factor.observed(0.01, 10.0)
        assert before <= factor.value <= before * FACTOR_STEP * (1 + 1e-9)
        before = factor.value
    assert factor.value == MOST
    for _ in range(400):
        factor.observed(1.0, 0.0)
        assert factor.value >= before / FACTOR_STEP * (1 - 1e-9)
        before = factor.value
    assert factor.value == 1 / MOST


@pytest.mark.parametrize(
    ("predicted_s", "seconds"), [(0.0, 1.0), (1.0, float("inf")), (1.0, float("nan")), (1.0, -1.0)]
)
def test_what_says_nothing_is_not_learnt_from(predicted_s: float, seconds: float) -> None:
    factor = PredictionFactor()
    factor.observed(predicted_s, seconds)
    assert not factor.is_known and factor.value == 1.0


def test_the_line_of_steps_is_found_and_moves_slowly() -> None:
    line, random = StepLine(), Random(2)
    for _ in range(600):
        rows = random.randrange(1, 40)
        line.measured(rows, (0.010 + 0.0005 * rows) * random.uniform(0.95, 1.05))
    assert line.s_per_row == pytest.approx(0.0005, rel=0.1)
    assert line.alone_s == pytest.approx(0.010, rel=0.1)
    assert line.step_s(20) == pytest.approx(0.020, rel=0.05)
    before = line.s_per_row
    for rows in 20 * (40, 1):
        line.measured(rows, 0.5 * rows)
        assert before / ROW_STEP * (1 - 1e-9) <= line.s_per_row <= before * ROW_STEP * (1 + 1e-9)
        before = line.s_per_row
    assert line.s_per_row > 0.0006, "it does move"


def test_rows_that_never_change_say_nothing_of_a_row() -> None:
    """Guards against a slope that is read off noise."""
    line, random = StepLine(), Random(3)
    for _ in range(10 * FEWEST_REPORTS):
        line.measured(7, random.random())
    assert (line.s_per_row, line.step_s(7)) == (0.0, 0.0)
    fitted = cluster()
    assert fitted.step("d0", 0.064) == (0.064, 0.064 / ASSUMED_ROWS)


def test_a_slow_decode_worker_is_told_apart() -> None:
    fitted, random = cluster(), Random(4)
    for _ in range(600):
        for name, slower in (("d0", 1.0), ("d1", 2.0)):
            rows = random.randrange(1, 40)
            fitted.reported(name, load(running_requests=rows, s_per_token=slower * (0.010 + 0.0005 * rows)))
    (quick_s, quick_row_s), (slow_s, slow_row_s) = fitted.step("d0", 0.0), fitted.step("d1", 0.0)
    assert slow_s / quick_s == pytest.approx(2.0, rel=0.1) and slow_row_s / quick_row_s == pytest.approx(2.0, rel=0.1)


def test_an_end_teaches_the_workers_that_it_names() -> None:
    fitted = cluster()
    for _ in range(200):
        fitted.ended((0.1, 0.2), account(prefill_queue=0.1, prefill_run=0.2, migrate=0.1))
    assert fitted.delay("p0") == pytest.approx(3.0)
    assert fitted.exposure("d0")[0] == pytest.approx(0.5)
    for _ in range(200):
        fitted.ended((0.1, 0.2), account("p1", prefill_run=0.1, migrate=0.2))
    assert fitted.delay("p1") == pytest.approx(1.0)
    assert fitted.exposure("d0") == pytest.approx((0.5, 1.0)), "the way from the other host is another one"


def test_who_was_never_seen_is_like_the_others() -> None:
    fitted = cluster()
    assert (fitted.delay("p1"), fitted.exposure("d1"), fitted.s_per_token("p1")) == (1.0, (1.0, 1.0), 0.0)
    fitted.reported("p0", load(s_per_token=0.003))
    fitted.reported("d0", load(s_per_block={"p0": 0.001, "p1": 0.01}))
    for _ in range(200):
        fitted.ended((0.1, 0.2), account(prefill_run=0.2, migrate=0.1))
    assert (fitted.s_per_token("p1"), fitted.s_per_token("d1")) == (0.003, 0.003)
    assert fitted.delay("p1") == fitted.delay("p0") != 1.0
    assert fitted.exposure("d1") == fitted.exposure("d0") != (1.0, 1.0)
    assert fitted.s_per_block("d1") == fitted.s_per_block("d0") == (0.001, 0.01)
    fitted.joined("p0", "prefill", "host 0")
    assert fitted.delay("p0") == 1.0, "a new life begins anew"


def test_who_has_run_no_step_does_not_decode_in_no_time() -> None:
    """Guards a next turn, which left its cached prompt for an idle worker that had run nothing yet."""
    fitted = cluster()
    assert fitted.step("d1", 0.0) == (0.0, 0.0), "nobody has run any"
    fitted.reported("d0", load(s_per_token=0.008))
    assert fitted.step("d1", 0.0) == fitted.step("d0", 0.008) == (0.008, 0.008 / ASSUMED_ROWS)
    assert fitted.step("d1", 0.002) == (0.002, 0.002 / ASSUMED_ROWS), "its own, once it has any"
    fitted.forget("d0")
    assert fitted.step("d1", 0.0) == (0.0, 0.0)


def test_equals_are_priced_as_equals() -> None:
    """Guards a worker that is asked less, runs shorter steps, seems slower by that, and is asked less still; and one
    that is slower indeed."""
    fitted = cluster()
    for name, s_per_token in (("p0", 0.0030), ("p1", 0.0034)):
        fitted.reported(name, load(s_per_token=s_per_token))
    assert fitted.reading("p0")[:2] == fitted.reading("p1")[:2] == (pytest.approx(0.0032), 1.0)
    assert (fitted.reading("p0")[2], fitted.reading("p1")[2]) == (fitted.host("p0"), fitted.host("p1"))
    for name, late in (("p0", 0.12), ("p1", 0.10)):
        for _ in range(200):
            fitted.ended((0.1, 0.2), account(name, prefill_run=late, migrate=0.1))
    assert fitted.reading("p0")[1] == fitted.reading("p1")[1] == pytest.approx(1.1)
    fitted.reported("p1", load(s_per_token=0.0090))
    assert (fitted.reading("p0")[0], fitted.reading("p1")[0]) == (0.0030, 0.0090)
    for _ in range(200):
        fitted.ended((0.1, 0.2), account("p1", prefill_run=0.36, migrate=0.1))
    # 1.2 and 3.6: the median is 2.4, and nobody is quicker.
    assert (fitted.reading("p0")[1], fitted.reading("p1")[1]) == pytest.approx((2.4, 3.6 / ALIKE), rel=0.01)
    assert fitted.s_per_token("p1") == 0.0090, "what is known stays known"
    assert fitted.delay("p1") == pytest.approx(3.6, rel=0.01)


def test_a_line_is_no_quicker_for_the_short_prompts_that_it_takes_first() -> None:
    """Guards equals that are not equals any more: the short prompts of a growing line end first, long before they were
    predicted to. A worker that these made look quick was sent more, grew, and looked quicker."""
    fitted = cluster()
    for _ in range(32):
        for _ in range(8):  # overtakes the long one
            fitted.ended((10.0, 0.0), account(prefill_queue=0.5, prefill_run=0.1, prompt=1000, cached=990))
        fitted.ended((10.0, 0.0), account(prefill_queue=10.0, prefill_run=1.0, prompt=1000))
        fitted.ended((10.0, 0.0), account("p1", prefill_queue=10.0, prefill_run=1.0, prompt=1000))
    assert fitted.delay("p0") == pytest.approx(1.0, rel=0.15)
    assert fitted.reading("p0") == (0.0, pytest.approx(fitted.reading("p1")[1]), 0)


def test_one_long_prompt_counts_for_no_more_than_some_usual_ones() -> None:
    """Guards the short prompts that come after a long one was late once."""
    fitted = cluster()
    for _ in range(64):
        fitted.ended((1.0, 0.0), account(prefill_run=1.0, prompt=16))
    fitted.ended((1.0, 0.0), account(prefill_run=8.0, prompt=100_000))
    for _ in range(96):
        fitted.ended((1.0, 0.0), account(prefill_run=1.0, prompt=16))
    assert 1.0 < fitted.delay("p0") < 1.5


@pytest.mark.parametrize(("first", "after", "late"), [(1, 1, 1.07), (100, 64, 1.03), (100_000, 64, 1.25)])
def test_a_workers_first_prompt_is_measured_by_those_of_others(first: int, after: int, late: float) -> None:
    """Guards a new worker: one long prompt made it slow for as long as a hundred more took, and beside a first one that
    was cached those after it did not count."""
    fitted = cluster()
    for _ in range(64):
        fitted.ended((1.0, 0.0), account(prefill_run=1.0, prompt=100))
    fitted.ended((1.0, 0.0), account("p1", prefill_run=8.0, prompt=first))
    assert fitted.delay("p1") == FACTOR_STEP
    for _ in range(after):
        fitted.ended((1.0, 0.0), account("p1", prefill_run=1.0, prompt=100))
    assert fitted.delay("p1") == pytest.approx(late, abs=0.01)


def test_a_decode_worker_that_reads_prompts_has_its_own_speed() -> None:
    fitted = cluster()
    fitted.reported("p0", load(s_per_token=0.003))
    fitted.reported("d0", load(s_per_token=0.05, s_per_prompt_token=0.007))
    assert (fitted.s_per_token("d0"), fitted.s_per_token("d1"), fitted.delay("d0")) == (0.007, 0.003, 1.0)


def test_what_went_otherwise_than_priced_teaches_only_the_length_of_answers() -> None:
    fitted = cluster()
    for _ in range(300):
        fitted.ended(None, account(output=10_000, prefill_run=9.0, migrate=9.0))
    assert (fitted.delay("p0"), fitted.exposure("d0")) == (1.0, (1.0, 1.0))
    assert ASSUMED_ANSWER_TOKENS < fitted.answer_tokens <= MOST_ANSWER_TOKENS


def test_workers_that_are_gone_are_forgotten() -> None:
    fitted = cluster()
    fitted.reported("p0", load(s_per_token=0.003))
    fitted.forget("p0")
    fitted.reported("p0", load(s_per_token=0.003))
    fitted.ended((0.1, 0.1), account(prefill_run=0.2))
    assert (fitted.s_per_token("p1"), fitted.delay("p1"), fitted.host("p0")) == (0.0, 1.0, 0)


def test_a_name_that_comes_back_in_another_role_has_no_fit_of_the_former() -> None:
    fitted = cluster()
    fitted.reported("p0", load(s_per_token=0.003))
    fitted.joined("p0", "decode", "host 0")
    assert fitted.s_per_token("p0") == 0.0
    fitted.reported("p0", load(s_per_prompt_token=0.005))
    assert fitted.s_per_token("p0") == 0.005


def test_an_end_without_output_says_nothing_of_answers() -> None:
    """Guards the length that room and steps are priced by, against requests that end before their first token."""
    fitted = cluster()
    fitted.ended(None, account(output=0, prefill_run=0.1))
    assert fitted.answer_tokens == ASSUMED_ANSWER_TOKENS
    fitted.ended(None, account(output=1, prefill_run=0.1))
    assert fitted.answer_tokens < ASSUMED_ANSWER_TOKENS


def test_near_and_far_have_medians_of_their_own() -> None:
    """Guards who was never seen, and a name that nobody knows: both sides of each figure, and not one for two."""
    fitted = cluster()
    fitted.reported("d0", load(s_per_block={"p0": 0.001, "p1": 0.01}))
    for _ in range(200):
        fitted.ended((0.1, 0.2), account(prefill_run=0.1, migrate=0.1))
        fitted.ended((0.1, 0.2), account("p1", prefill_run=0.1, migrate=0.4))
    assert fitted.exposure("d0") == pytest.approx((0.5, 2.0))
    assert fitted.exposure("d1") == fitted.exposure("nobody") == fitted.exposure("d0")
    assert fitted.least_exposure("d0") == pytest.approx(0.5) and fitted.least_exposure("d1") == 1.0
    assert fitted.s_per_block("d1") == fitted.s_per_block("nobody") == (0.001, 0.01)
    fitted.reported("d1", load(s_per_block={"p0": 0.02}))
    assert fitted.s_per_block("d1") == (0.001, 0.02), "its own, and the median where it has none"


@pytest.mark.parametrize(("prefill", "decode"), [("nobody", "d0"), ("p0", "nobody"), ("nobody", "nobody")])
def test_an_end_on_a_worker_that_is_gone_teaches_nobody(prefill: str, decode: str) -> None:
    """Guards the router against the account of a request whose worker has left meanwhile."""
    fitted = cluster()
    fitted.ended((0.1, 0.2), account(prefill, decode, prefill_run=9.0, migrate=9.0))
    assert (fitted.delay("p0"), fitted.exposure("d0")) == (1.0, (1.0, 1.0))


def test_the_least_step_is_that_with_one_more_request() -> None:
    """Guards the bound: the line of steps at one row more than run, and never more than was measured."""
    fitted = cluster()
    fitted._line.s_per_row, fitted._line._seconds, fitted._line._rows = 0.5, 4.0, 4.0
    assert fitted._line.alone_s == 2.0
    assert [fitted.least_step_s("d0", 4.0, rows) for rows in (0, 1, 3, 9)] == [2.5, 3.0, 4.0, 4.0]


def test_of_a_name_that_nobody_knows_nothing_is_known() -> None:
    """Guards a price that is asked for while its worker leaves."""
    for fitted in (Coefficients(), cluster()):
        assert (fitted.s_per_token("x"), fitted.usual_s_per_token, fitted.least_s_per_token("x")) == (0.0, 0.0, 0.0)
        assert (fitted.delay("x"), fitted.exposure("x"), fitted.least_exposure("x")) == (1.0, (1.0, 1.0), 1.0)
        assert (fitted.step("x", 0.0), fitted.s_per_block("x"), fitted.host("x")) == ((0.0, 0.0), (0.0, 0.0), 0)
    fitted.reported("p0", load(s_per_token=0.25))
    assert fitted.s_per_token("x") == fitted.usual_s_per_token == 0.25 and fitted.least_s_per_token("x") == 0.0


@pytest.mark.parametrize("step_s", [0.0, float("inf"), float("nan"), -1.0])
def test_a_report_that_cannot_be_teaches_nothing_of_steps(step_s: float) -> None:
    """Guards every price of a pool against one worker's figure."""
    fitted = cluster()
    for rows in (1, 9) * FEWEST_REPORTS:
        fitted.reported("d0", load(s_per_token=0.01 * rows, running_requests=rows))
    before = fitted.step("d0", 0.01), fitted.step("d1", 0.01)
    fitted.reported("d0", load(s_per_token=step_s, running_requests=9))
    assert (fitted.step("d0", 0.01), fitted.step("d1", 0.01)) == before


def test_who_has_moved_blocks_one_way_is_like_the_others_in_the_other() -> None:
    fitted = cluster()
    for _ in range(200):
        fitted.ended((0.1, 0.2), account("p0", "d0", prefill_run=0.1, migrate=0.1))
        fitted.ended((0.1, 0.2), account("p0", "d1", prefill_run=0.1, migrate=0.4))
    assert fitted.exposure("d0") == fitted.exposure("d1") == pytest.approx((0.5, 2.0))


def test_the_line_is_read_off_so_many_reports() -> None:
    line = StepLine()
    for number in range(FEWEST_REPORTS):
        assert not line.s_per_row
        rows = 1 + 8 * (number % 2)
        line.measured(rows, 0.01 + 0.001 * rows)
    assert line.s_per_row == pytest.approx(0.001)


def test_an_end_is_part_of_the_medians_at_once() -> None:
    fitted = cluster()
    assert fitted.exposure("d1") == (1.0, 1.0) and fitted.delay("p1") == 1.0
    fitted.ended((0.1, 0.2), account(prefill_run=0.2, migrate=0.1))
    assert fitted.exposure("d1")[0] == fitted.exposure("d0")[0] < 1.0 < fitted.delay("p0") == fitted.delay("p1")


def test_the_line_of_steps_is_that_of_whoever_comes() -> None:
    """Guards a price that is asked for while its worker leaves, when the line is known."""
    fitted = cluster()
    for rows in (1, 9) * FEWEST_REPORTS:
        fitted.reported("d0", load(s_per_token=0.01 + 0.001 * rows, running_requests=rows))
    assert fitted.step("nobody", 0.5) == fitted.step("p0", 0.5) == (fitted._line.alone_s, fitted._line.s_per_row)
    fitted.forget("d0")
    assert fitted.step("d0", 0.5) == (fitted._line.alone_s, fitted._line.s_per_row)


def test_the_first_slope_is_that_of_least_squares_over_all_reports() -> None:
    """Guards the earliest reports against being forgotten at once: until there are many, all of them count alike."""
    line, random = StepLine(), Random(5)
    rows_of = random.sample(range(1, 40), FEWEST_REPORTS)
    points = [(rows, (0.010 + 0.001 * rows) * random.uniform(0.5, 1.5)) for rows in rows_of]
    for point in points:
        line.measured(*point)
    mean_rows, mean_s = (sum(values) / FEWEST_REPORTS for values in zip(*points, strict=True))
    apart = sum((rows - mean_rows) ** 2 for rows, _ in points)
    slope = sum((rows - mean_rows) * (step_s - mean_s) for rows, step_s in points) / apart
    assert (line.s_per_row, line.alone_s) == pytest.approx((slope, mean_s - slope * mean_rows))


class PlainFit:
    """Everything that was observed, and each coefficient worked out from all of it when it is asked for."""

    def __init__(self) -> None:
        self.roles: dict[str, str] = {}
        self.hosts: dict[str, str] = {}
        self.loads: dict[str, Load] = {}
        self.late: dict[tuple[str, str], list[tuple[float, float, int, float]]] = {}
        """By worker and what of it: what was predicted, what happened, its work, and what was usual elsewhere then."""
        self.steps: list[tuple[int, float]] = []

    def joined(self, name: str, role: str, host: str) -> None:
        self.loads.pop(name, None)
        self.late = {key: pairs for key, pairs in self.late.items() if key[0] != name}
        self.roles[name], self.hosts[name] = role, host

    def reported(self, name: str, load: Load) -> None:
        self.loads[name] = load
        if self.roles[name] == "decode" and load.running_requests and load.s_per_token:
            self.steps.append((load.running_requests, load.s_per_token))
            alone_s, row_s = self.line()
            self.observed(name, "steps", alone_s + row_s * load.running_requests if row_s else 0.0, load.s_per_token)

    def observed(self, name: str, what: str, predicted_s: float, seconds: float, work: int = 1) -> None:
        if predicted_s > 1e-6:
            beside = [self.counted(self.late[one, what])[1] for one in self.roles if (one, what) in self.late]
            self.late.setdefault((name, what), []).append((predicted_s, seconds, work, self.middle(beside, work)))

    def factor(self, name: str, what: str) -> float | None:
        """None: it is not known."""
        pairs, value = self.late.get((name, what), []), 1.0
        for count in range(1, len(pairs) + 1):
            weights = [(1 - NEWEST) ** (count - 1 - at) * self.counted(pairs[: at + 1])[0] for at in range(count)]
            sums = [sum(w * pair[of] for w, pair in zip(weights, pairs, strict=False)) for of in (0, 1)]
            value = min(max(sums[1] / sums[0], value / FACTOR_STEP), value * FACTOR_STEP)
            value = min(max(value, 1 / MOST), MOST)
        return value if pairs else None

    def counted(self, pairs: list[tuple[float, float, int, float]]) -> tuple[float, float]:
        """What the last of these counts for, by its work, as far as that is usual; and what is usual after it."""
        weight, usual = 0.0, pairs[0][3]
        for _, _, work, _ in pairs:
            weight = min(work, MOST * usual)
            usual = (1 - NEWEST) * usual + NEWEST * weight
        return weight, usual

    def line(self) -> tuple[float, float]:
        """A step without rows, and what each adds; fewer reports than would let the first of them fade."""
        row_s = alone_s = 0.0
        for count in range(FEWEST_REPORTS, len(self.steps) + 1):
            rows, seconds = zip(*self.steps[:count], strict=True)
            mean_rows, mean_s = sum(rows) / count, sum(seconds) / count
            variance = sum((n - mean_rows) ** 2 for n in rows) / count
            if variance >= 1.0:
                slope = sum((n - mean_rows) * (s - mean_s) for n, s in self.steps[:count]) / count / variance
                slope = min(max(slope, mean_s / ROWS_AT_LEAST), mean_s / mean_rows)
                row_s = min(max(slope, row_s / ROW_STEP), row_s * ROW_STEP) if row_s else slope
            alone_s = max(mean_s - row_s * mean_rows, 0.0)
        return alone_s, row_s

    def pool(self, role: str) -> list[str]:
        return [name for name, of in self.roles.items() if of == role]

    def middle(self, figures: Iterable[float | None], unknown: float) -> float:
        known = [figure for figure in figures if figure]
        return median(known) if known else unknown

    def own_s_per_token(self, name: str) -> float:
        load = self.loads.get(name)
        return 0.0 if load is None else load.s_per_token if self.roles[name] == "prefill" else load.s_per_prompt_token

    @property
    def usual_s_per_token(self) -> float:
        prefills, decodes = (map(self.own_s_per_token, self.pool(role)) for role in ("prefill", "decode"))
        return self.middle(prefills, self.middle(decodes, 0.0))

    def s_per_token(self, name: str) -> float:
        return self.own_s_per_token(name) or self.usual_s_per_token

    def usual_delay(self) -> float:
        return self.middle((self.factor(name, "delay") for name in self.pool("prefill")), 1.0)

    def delay(self, name: str) -> float:
        if self.roles.get(name) != "prefill":
            return 1.0
        return self.factor(name, "delay") or self.usual_delay()

    def host(self, name: str) -> int:
        """Hosts are numbered as they come."""
        return list(dict.fromkeys(self.hosts.values())).index(self.hosts[name]) if name in self.hosts else 0

    def reading(self, name: str) -> tuple[float, float, int]:
        if self.roles.get(name) != "prefill":
            return self.s_per_token(name), 1.0, self.host(name)
        usual, own = self.usual_s_per_token, self.own_s_per_token(name)
        apart = max(own, usual) > ALIKE * min(own, usual)
        late, usually = self.delay(name), self.usual_delay()
        return own if own and apart else usual, max(late / ALIKE, usually), self.host(name)

    @property
    def unmeasured_step_s(self) -> float:
        return self.step("nobody", 0.0)[0]

    def step(self, name: str, measured_s: float) -> tuple[float, float]:
        alone_s, row_s = self.line()
        if row_s:
            factor = self.factor(name, "steps") or 1.0
            return factor * alone_s, factor * row_s
        loads = [self.loads.get(one) for one in self.pool("decode")]
        step_s = measured_s or self.middle((load.s_per_token for load in loads if load), 0.0)
        return step_s, step_s / ASSUMED_ROWS

    def least_s_per_token(self, name: str) -> float:
        late = self.factor(name, "delay") if self.roles.get(name) == "prefill" else None
        return self.own_s_per_token(name) * min(late or 1.0, 1.0)

    def least_step_s(self, name: str, measured_s: float, rows: int) -> float:
        alone_s, row_s = self.step(name, measured_s)
        return min(measured_s, alone_s + row_s * (rows + 1))

    def exposure(self, name: str) -> tuple[float, ...]:
        usual = [self.middle((self.factor(one, way) for one in self.pool("decode")), 1.0) for way in ("near", "far")]
        if self.roles.get(name) != "decode":
            return tuple(usual)
        return tuple(self.factor(name, way) or other for way, other in zip(("near", "far"), usual, strict=True))

    def least_exposure(self, name: str) -> float:
        if self.roles.get(name) != "decode":
            return 1.0
        return min(1.0, *(self.factor(name, way) or 1.0 for way in ("near", "far")))

    def ways_s(self, name: str, *, far: bool) -> float:
        ways = self.loads[name].s_per_block if name in self.loads else {}
        there = {peer: self.roles.get(peer) == "prefill" and self.hosts[peer] != self.hosts[name] for peer in ways}
        return self.middle((seconds for peer, seconds in ways.items() if there[peer] is far), 0.0)

    def s_per_block(self, name: str) -> tuple[float, ...]:
        """By way, as reported: the readers of then are those of now, in this test."""
        pool = self.pool("decode")
        usual = [self.middle((self.ways_s(one, far=far) for one in pool), 0.0) for far in (False, True)]
        own = [self.ways_s(name, far=far) if name in pool else 0.0 for far in (False, True)]
        return tuple(one or other for one, other in zip(own, usual, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_reports_and_ends_comes_to_what_all_of_them_say(seed: int) -> None:
    """Guards each coefficient of a price: one observation too many, or one that is another worker's."""
    random, fitted, plain = Random(seed), Coefficients(), PlainFit()
    names = {"p0": "x", "p1": "y", "p2": "x", "d0": "x", "d1": "y", "d2": "y"}

    def join(name: str) -> None:
        for one in (fitted, plain):
            one.joined(name, "prefill" if name[0] == "p" else "decode", names[name])

    for name in names:
        join(name)
    for turn in range(110):
        what, name = random.randrange(9), random.choice(list(names))
        if what < 5:
            ways = {peer: random.choice((0.001, 0.002, 0.01)) for peer in names if random.random() < 0.3}
            told = load(
                running_requests=random.choice((0, 1, 2, 9)),
                s_per_token=random.choice((0.0, 0.01, 0.011, 0.02)),
                s_per_prompt_token=random.choice((0.0, 0.003)),
                s_per_block=ways if name[0] == "d" else {},
            )
            fitted.reported(name, told)
            plain.reported(name, told)
        elif what < 8:
            reader, decode = random.choice(("p0", "p1", "p2")), random.choice(("d0", "d1", "d2"))
            predicted_s = random.choice((0.0, 0.1, 1.0)), random.choice((0.0, 0.2))
            queue_s, run_s, move_s = (random.choice((0.0, 0.1, 0.3, 2.0)) for _ in range(3))
            work, stages = random.choice((1, 1, 16, 400)), {"prefill_run": run_s, "migrate": move_s}
            told = account(reader, decode, prompt=1000, cached=1000 - work, prefill_queue=queue_s, **stages)
            fitted.ended(predicted_s, told)
            plain.observed(reader, "delay", predicted_s[0], queue_s + run_s, work)
            plain.observed(decode, "far" if names[reader] != names[decode] else "near", predicted_s[1], move_s)
        elif turn % 3 == 0:
            join(name)
        assert fitted.usual_s_per_token == pytest.approx(plain.usual_s_per_token)
        assert fitted.unmeasured_step_s == pytest.approx(plain.unmeasured_step_s)
        for one in (random.choice(list(names)), "nobody"):
            for ask in ("s_per_token", "delay", "reading", "exposure", "least_s_per_token", "least_exposure", "host"):
                assert getattr(fitted, ask)(one) == pytest.approx(getattr(plain, ask)(one)), ask
            assert fitted.s_per_block(one) == pytest.approx(plain.s_per_block(one))
            measured_s = random.choice((0.0, 0.015))
            assert fitted.step(one, measured_s) == pytest.approx(plain.step(one, measured_s))
            assert fitted.least_step_s(one, measured_s, 3) == pytest.approx(plain.least_step_s(one, measured_s, 3))
