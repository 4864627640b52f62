"""Policy losses: gradients against their formula, bands, splits, poison."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.rl.losses import policy_loss

NAMES = ["glm5_agentic", "grpo"]


def make_batch(seed=0, shape=(4, 6), spread=0.3):
    rng = np.random.default_rng(seed)
    logp = rng.uniform(-3, -0.1, shape).astype(np.float32)
    return {
        "logp": logp,
        "behaviour_logp": logp - rng.normal(0, spread, shape).astype(np.float32),
        "advantages": rng.normal(size=shape).astype(np.float32),
        "mask": (rng.random(shape) < 0.7).astype(np.float32),
        "rollout_ids": np.tile(np.arange(shape[0])[:, None], (1, shape[1])),
        "group_ids": np.zeros(shape, np.int32),
    }


def value_and_gradient(name, batch, normaliser=1.0, **hyper):
    """The loss, d loss / d logp, and the metrics."""
    rest = {key: value for key, value in batch.items() if key != "logp"}
    function = jax.value_and_grad(lambda logp: policy_loss(name, logp=logp, normaliser=normaliser, **rest, **hyper), has_aux=True)
    (loss, metrics), gradient = function(jnp.asarray(batch["logp"]))
    return loss, np.asarray(gradient), metrics


def test_gradient_of_double_sided_importance_sampling():
    """r·A·∇log π inside the band and exactly 0 outside, for both signs of A; the value is the formula's."""
    batch = make_batch()
    loss, gradient, metrics = value_and_gradient("glm5_agentic", batch, normaliser=7.0, eps_low=0.2, eps_high=0.3)
    ratio = np.exp(batch["logp"] - batch["behaviour_logp"])
    inside = (ratio > 0.8) & (ratio < 1.3) & (batch["mask"] > 0)
    positive = batch["advantages"] > 0
    for sign in (positive, ~positive):
        assert (inside & sign).any() and (~inside & sign & (batch["mask"] > 0)).any(), "the batch must hold every case"
    coefficient = np.where(inside, ratio * batch["advantages"], 0)
    np.testing.assert_allclose(gradient, -coefficient / 7, rtol=1e-5)
    assert not gradient[~inside].any()
    np.testing.assert_allclose(loss, -(coefficient * batch["logp"]).sum() / 7, rtol=1e-5)

    sampled = batch["mask"] > 0
    assert metrics["tokens"] == sampled.sum()
    assert metrics["tokens_below_band"] == (sampled & (ratio <= 0.8)).sum()
    assert metrics["tokens_above_band"] == (sampled & (ratio >= 1.3)).sum()
    log_ratio = np.log(ratio)[sampled]
    for key, expected in {
        "ratio_sum": ratio[sampled].sum(),
        "ratio_max": ratio[sampled].max(),
        "logp_difference_max": abs(log_ratio).max(),
        "kl_k1_sum": -log_ratio.sum(),
        "kl_k3_sum": (ratio[sampled] - 1 - log_ratio).sum(),
        "loss_sum": loss * 7,
    }.items():
        np.testing.assert_allclose(metrics[key], expected, rtol=1e-4, err_msg=key)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("side", ["low", "high"])
def test_both_ends_of_the_band_are_outside(side, advantage):
    """The band's end is put on the very ratio, and then one float away from it."""
    logp = jnp.full((1, 1), -0.7 if side == "low" else -0.1, jnp.float32)
    behaviour_logp = jnp.full((1, 1), -0.4, jnp.float32)
    ratio = float(jnp.exp(logp - behaviour_logp)[0, 0])
    ones = np.ones((1, 1), np.float32)
    batch = dict.fromkeys(["mask", "rollout_ids", "group_ids"], ones)
    batch |= {"logp": logp, "behaviour_logp": behaviour_logp, "advantages": advantage * ones}
    away = float(np.nextafter(np.float32(ratio), np.float32(0 if side == "low" else 9)))

    def gradient(end):
        hyper = {"eps_low": 1 - end, "eps_high": 9.0} if side == "low" else {"eps_low": 0.9, "eps_high": end - 1}
        return value_and_gradient("glm5_agentic", batch, **hyper)[1][0, 0]

    assert gradient(ratio) == 0
    np.testing.assert_allclose(gradient(away), -ratio * advantage, rtol=1e-6)


def test_on_policy_gradient_is_the_score_function_for_every_loss():
    batch = make_batch(spread=0)
    for name in NAMES:
        _, gradient, metrics = value_and_gradient(name, batch)
        np.testing.assert_allclose(gradient, -batch["advantages"] * batch["mask"], rtol=1e-6)
        assert metrics["ratio_sum"] == metrics["tokens"] and metrics["kl_k3_sum"] == 0


def test_grpo_clips_only_what_would_gain():
    batch = make_batch(spread=0.5)
    batch["proximal_logp"] = batch["behaviour_logp"]
    batch["behaviour_logp"] = batch["logp"] - 1
    _, gradient, _ = value_and_gradient("grpo", batch, eps_low=0.2, eps_high=0.3)
    ratio, advantages = np.exp(batch["logp"] - batch["proximal_logp"]), batch["advantages"]
    clipped = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.8))
    np.testing.assert_allclose(gradient, -np.where(clipped, 0, ratio * advantages) * batch["mask"], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_cutting_into_microbatches_changes_nothing(name):
    batch = make_batch()
    normaliser = batch["mask"].sum()
    loss, gradient, metrics = value_and_gradient(name, batch, normaliser)
    for cut in (1, 3):
        parts = [value_and_gradient(name, {k: v[rows] for k, v in batch.items()}, normaliser) for rows in (slice(cut), slice(cut, None))]
        np.testing.assert_allclose(sum(part[0] for part in parts), loss, rtol=1e-5)
        np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), gradient)
        for key, whole in metrics.items():
            merge = max if key.endswith("_max") else sum
            np.testing.assert_allclose(merge(part[2][key] for part in parts), whole, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_order_of_tokens_does_not_matter(name):
    batch = make_batch()
    order = np.random.default_rng(1).permutation(batch["logp"].size)
    shuffled = {key: value.reshape(-1)[order].reshape(value.shape) for key, value in batch.items()}
    (loss, gradient, _), (other_loss, other_gradient, _) = value_and_gradient(name, batch), value_and_gradient(name, shuffled)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    np.testing.assert_array_equal(gradient.reshape(-1)[order], other_gradient.reshape(-1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_masked_may_hold_anything(name, poison):
    batch = make_batch()
    batch["proximal_logp"] = batch["behaviour_logp"]
    loss, gradient, metrics = value_and_gradient(name, batch)
    poisoned = dict(batch)
    for key in ("logp", "behaviour_logp", "proximal_logp", "advantages"):
        poisoned[key] = np.where(batch["mask"] > 0, batch[key], np.float32(poison))
    other_loss, other_gradient, other_metrics = value_and_gradient(name, poisoned)
    assert loss == other_loss
    np.testing.assert_array_equal(gradient, other_gradient)
    assert metrics == other_metrics


@pytest.mark.parametrize("name", NAMES)
def test_a_sampled_token_without_a_behaviour_logp_is_left_out_and_counted(name):
    batch = make_batch()
    row, column = np.argwhere(batch["mask"] > 0)[0]
    broken = {**batch, "behaviour_logp": batch["behaviour_logp"].copy()}
    broken["behaviour_logp"][row, column] = np.nan
    without = {**batch, "mask": batch["mask"].copy()}
    without["mask"][row, column] = 0
    (loss, gradient, metrics), (expected_loss, expected_gradient, _) = value_and_gradient(name, broken), value_and_gradient(name, without)
    assert loss == expected_loss and metrics["tokens_without_behaviour_logp"] == 1
    np.testing.assert_array_equal(gradient, expected_gradient)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_enormous_ratios_stay_finite(name, gap):
    batch = make_batch()
    batch["behaviour_logp"] = batch["logp"] - np.float32(gap)
    batch["advantages"][0] = 0
    loss, gradient, metrics = value_and_gradient(name, batch)
    assert np.isfinite(loss) and np.isfinite(gradient).all() and all(np.isfinite(value) for value in metrics.values())


def test_nothing_sampled():
    batch = make_batch()
    batch["mask"][:] = 0
    loss, gradient, metrics = value_and_gradient("glm5_agentic", batch)
    assert loss == 0 and not gradient.any() and not any(metrics.values())


def test_refusals():
    batch = make_batch()
    with pytest.raises(ValueError, match="unknown policy loss 'gpro'; known: glm5_agentic, grpo"):
        policy_loss("gpro", normaliser=1, **batch)
    with pytest.raises(ValueError, match="has no beta; it has eps_low, eps_high"):
        policy_loss("grpo", normaliser=1, beta=2, **batch)
    with pytest.raises(ValueError, match="must all be"):
        policy_loss("grpo", normaliser=1, **{**batch, "advantages": batch["advantages"][:, :1]})
    with pytest.raises(ValueError, match="must all be"):
        policy_loss("grpo", normaliser=1, **{key: value[0] for key, value in batch.items()})
