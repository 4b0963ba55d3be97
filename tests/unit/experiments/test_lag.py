"""The sweep of lag: what a run's record says about it, and the summary over seeds."""

from experiments.asynchronous.lag import draw, lag_facts, summary


def run(lag, seed, last, **facts):
    curve = [
        {"train_s": t, "env_steps_total": 1000.0 * t, "evaluation_return_mean": value, "evaluation_return_std": 0.0}
        for t, value in ((1.0, 0.0), (2.0, last))
    ]  # fmt: skip
    return {
        "max_lag": lag,
        "seed": seed,
        "curve": curve,
        "lag_mean": 0.0,
        "lag_max": 0,
        "dropped_share": 0.0,
        **facts,
    }


def test_the_record_of_a_run_gives_mean_and_largest_lag_and_what_was_dropped():
    facts = lag_facts({"lags": {"0": 1, "2": 3}, "rows": {"sent": 8, "dropped": 2}})
    assert facts == {"lag_mean": 1.5, "lag_max": 2, "dropped_share": 0.25}  # (0 x 1 + 2 x 3) / 4
    assert lag_facts({"lags": {}, "rows": {}})["lag_max"] == 0


def test_the_summary_is_over_the_seeds_of_each_bound(tmp_path):
    runs = [
        run(2, 0, 10.0, lag_mean=1.0, lag_max=1),
        run(2, 1, 30.0, lag_mean=2.0, lag_max=2),
        run(0, 0, 5.0),
    ]
    rows = summary(runs)
    assert [row["max_lag"] for row in rows] == [0, 2]
    assert (rows[1]["lag_mean"], rows[1]["lag_max"], rows[1]["seeds"]) == (1.5, 2, 2)
    assert (rows[1]["last_return"], rows[1]["last_return_low"], rows[1]["last_return_high"]) == (
        20.0,
        10.0,
        30.0,
    )
    assert rows[1]["env_steps"] == 2000.0
    draw({"task": "t", "algorithm": "appo", "runs": runs, "summary": rows}, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
