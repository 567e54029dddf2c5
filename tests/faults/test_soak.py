"""The soak, in short: a tiny model, twenty seconds; and that it would see what is wrong."""

import pytest
from soak.asking import Answered, KnownQuestion, Token, in_form
from soak.clients import Findings
from soak.run import Soak, SoakPlan, soak
from tiny import saved

FORM = {"error": {"message": "m", "type": "t", "param": None, "code": "c"}}


def test_a_wrong_answer_would_be_seen():
    alone = [Token("a", 3.0), Token("b", 1e-5), Token("c", 2.0)]
    question = KnownQuestion([], 3, alone)
    assert question.compare(alone) == "same"
    assert question.compare([alone[0], Token("x", 1.0)]) == "near-tie"
    assert question.compare([Token("x", 1.0), *alone[1:]]).startswith("token 0 of 3")
    assert question.compare(alone[:2]).startswith("token 2 of 3")
    assert question.compare([*alone, Token("d", 1.0)]).startswith("token 3 of 3")


def test_only_quantised_products_widen_the_bound():
    for dtype, lead, expected in (
        ("float32", 0.25, "token 0"),
        ("float32, quantised products", 0.25, "near-tie"),
        ("float32, quantised products", 0.55, "token 0"),
    ):
        question = KnownQuestion([], 1)
        question.learn(Answered(200, [Token("a", lead)], report={"dtype": dtype}))
        assert question.compare([Token("b", 1.0)]).startswith(expected)


@pytest.mark.parametrize(("dtype", "change"), [("float32", 0.01), ("float32, quantised", 0.2)])
def test_moved_leads_would_be_seen(dtype, change):
    question = KnownQuestion([], 8)
    question.learn(Answered(200, [Token("a", 1.0)] * 8, report={"dtype": dtype}))
    assert question.compare([Token("a", 1.0), *[Token("a", 1.0 + change)] * 7]).startswith("leads")
    assert question.compare([Token("a", 1.0)] * 8) == "same"


def test_errors_out_of_form_would_be_seen():
    assert in_form(FORM)
    findings = Findings()
    findings.add("a", 404, {404}, FORM)
    assert not findings.violations
    for status, error in ((500, FORM), (404, {"detail": "Not Found"}), (404, "<html>")):
        findings.add("a", status, {404}, error)
    assert len(findings.violations) == 3


def test_a_leak_would_be_seen():
    steady, growing = Soak(SoakPlan(), "u"), Soak(SoakPlan(), "u")
    steady.rss, growing.rss = [50, 100, 101, 100, 99, 101], [10, 20, 100, 110, 150, 160]
    assert abs(steady.growth()) < 0.02
    assert growing.growth() > 0.4
    assert Soak(SoakPlan(), "u").growth() is None


@pytest.mark.slow
async def test_twenty_seconds(tmp_path):
    """In so short a time the memory tier still fills: leaks are the long soak's to find."""
    model = saved(tmp_path / "model")
    plan = SoakPlan(
        seconds=20, clients=6, questions=6, chunk_tokens=60, disk_bytes=2 << 20, rss_tolerance=1.0
    )
    found = (await soak(plan, tmp_path, model=model)).findings
    assert not found.violations
    assert found.counts["same"] > 20
    assert found.counts["killed clients"]
    assert found.counts["refused while stopping"]
    assert found.statuses["fill 200"]
    for status in ("wrong key 401", "malformed 400", "unknown model 404", "cancel 200"):
        assert found.statuses[status]
