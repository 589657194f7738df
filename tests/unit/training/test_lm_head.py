import pytest
import torch

from verl_opd.opd.losses import FULL_VOCABULARY, full_forward_kl
from verl_opd.training.lm_head import against_target, label_logprobs, row_loss, slot_logprobs


@pytest.fixture
def problem():
    torch.manual_seed(0)
    rows = torch.randn(9, 16)
    weight = torch.randn(50, 16)
    index = torch.tensor([0, 0, 3, 8, 5, 5, 5, 1])
    labels = torch.tensor([4, 7, 49, 0, 2, 2, 30, 11])
    return rows, weight, index, labels


@pytest.mark.parametrize("chunk", [1, 4, 9, 100])
def test_slot_logprobs_and_gradient_equal_full_float64_logits(problem, chunk):
    rows, weight, index, labels = problem
    grad = torch.linspace(-1, 2, len(index))
    ours = rows.clone().requires_grad_()
    values = slot_logprobs(ours, weight, index, labels, chunk)
    values.backward(grad)
    reference = rows.double().clone().requires_grad_()
    expected = torch.log_softmax(reference @ weight.double().T, 1)[index, labels]
    expected.backward(grad.double())
    torch.testing.assert_close(values.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad.double(), reference.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        label_logprobs(rows[index], weight, labels, chunk), values.detach(), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("chunk", [2, 9])
def test_row_forward_kl_and_gradient_equal_float64(problem, chunk):
    """K4: p near q, where bf16 loses a third of the gradient."""
    rows, weight, _, _ = problem
    teacher = rows + 0.01 * torch.randn_like(rows)  # p near q, where low precision hurts most
    ours = rows.clone().requires_grad_()
    values = row_loss(ours, weight, against_target(full_forward_kl, weight), chunk, teacher)[:, 0]
    grad = torch.linspace(0.5, 2, len(rows))
    values.backward(grad)
    reference = rows.double().clone().requires_grad_()
    log_p = torch.log_softmax(teacher.double() @ weight.double().T, 1)
    expected = (log_p.exp() * (log_p - torch.log_softmax(reference @ weight.double().T, 1))).sum(1)
    expected.backward(grad.double())
    torch.testing.assert_close(values.double(), expected.detach(), atol=1e-5, rtol=1e-3)
    assert (ours.grad.double() - reference.grad).norm() / reference.grad.norm() < 5e-3


def test_a_confident_row_keeps_its_small_gradient_in_bf16():
    torch.manual_seed(1)
    weight = torch.randn(40, 32).bfloat16()
    row = (weight[3].float() * 0.35).unsqueeze(0)
    ours = row.clone().requires_grad_()
    slot_logprobs(ours, weight, torch.tensor([0]), torch.tensor([3]), 8).sum().backward()
    probs = torch.softmax(row.bfloat16().double() @ weight.double().T, 1)
    expected = weight[3].double() - probs[0] @ weight.double()
    assert probs[0, 3] > 0.9
    assert (ours.grad[0].double() - expected).norm() / expected.norm() < 0.05


def test_no_entries_give_an_empty_differentiable_result(problem):
    rows, weight, _, _ = problem
    rows = rows.clone().requires_grad_()
    empty = torch.zeros(0, dtype=torch.long)
    slot_logprobs(rows[:0], weight, empty, empty, 4).sum().backward()
    assert rows.grad.abs().sum() == 0


@pytest.mark.parametrize("name", FULL_VOCABULARY)
@pytest.mark.parametrize("distance", [1.0, 0.01])
def test_every_divergence_through_the_head_equals_plain_autograd_in_float64(
    problem, name, distance
):
    rows, weight, _, _ = problem
    teacher = rows + distance * torch.randn_like(rows)
    ours = rows.clone().requires_grad_()
    grad = torch.linspace(0.5, 2, len(rows))
    values = row_loss(ours, weight, against_target(FULL_VOCABULARY[name], weight), 4, teacher)[:, 0]
    values.backward(grad)
    reference = rows.double().clone().requires_grad_()
    p, q = (
        torch.softmax(teacher.double() @ weight.double().T, 1),
        torch.softmax(reference @ weight.double().T, 1),
    )
    kl, overlap = (p * (p / q).log()).sum(1), torch.minimum(p, q).sum(1)
    w = (-3 * overlap.detach()).exp()
    expected = {
        "full_forward_kl": kl,
        "tv": (p - q).abs().sum(1) / 2,
        "lk_alpha": -overlap.log(),
        "lk_lambda": w * kl + (1 - w) * (1 - overlap),
    }[name]
    expected.backward(grad.double())
    torch.testing.assert_close(values.double(), expected.detach(), atol=2e-6, rtol=1e-3)
    assert (ours.grad.double() - reference.grad).norm() / reference.grad.norm() < 5e-3
