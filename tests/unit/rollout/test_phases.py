import pytest

from verl_opd.rollout.phases import Phase, PhaseMachine

ORDER = ["sleep", "wake_weights", "sync", "wake_kv_cache", "reset_prefix_cache"]


def test_the_allowed_order_returns_to_rollout():
    machine = PhaseMachine(0)
    for action in ORDER:
        machine.advance(action)
    assert machine.phase is Phase.ROLLOUT


@pytest.mark.parametrize("done", range(len(ORDER)))
def test_every_other_action_is_an_error_and_changes_nothing(done: int):
    for wrong in set(ORDER) - {ORDER[done]}:
        machine = PhaseMachine(3)
        for action in ORDER[:done]:
            machine.advance(action)
        before = machine.phase
        with pytest.raises(
            RuntimeError, match=f"replica 3 .*{before.value}.*{wrong}.*{ORDER[done]}"
        ):
            machine.advance(wrong)
        assert machine.phase is before


def test_generation_needs_the_rollout_phase():
    machine = PhaseMachine(1)
    machine.require_rollout()
    machine.advance("sleep")
    with pytest.raises(RuntimeError, match="replica 1 cannot generate in phase 'asleep'"):
        machine.require_rollout()
