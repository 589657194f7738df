from verl_opd.controller.trainers import balance
from verl_opd.opd.plan import BlockPlan, TrainItem


def item(name: str, length: int) -> TrainItem:
    return TrainItem(
        sample_id=name,
        prompt_ids=tuple(range(length)),
        response_ids=(1,),
        plan=BlockPlan(
            block_size=4,
            anchors=(),
            response_block=(),
            response_offset=(),
            response_label=(),
            rejected_block=(),
            rejected_offset=(),
            rejected_token=(),
            rejected_logprob=(),
        ),
    )


def test_longest_first_each_to_the_lightest_rank():
    shares = balance([item("a", 9), item("b", 4), item("c", 5), item("d", 1)], 2)
    assert [[entry.sample_id for entry in share] for share in shares] == [["a", "d"], ["c", "b"]]


def test_every_item_lands_once_in_any_order_of_arrival():
    items = [item(str(i), 3 + i % 4) for i in range(11)]
    shares = balance(items, 3)
    assert sorted(entry.sample_id for share in shares for entry in share) == sorted(
        entry.sample_id for entry in items
    )
    assert shares == balance(items[::-1], 3)


def test_ranks_without_an_item_get_an_empty_share():
    assert balance([item("a", 2)], 3) == [[item("a", 2)], [], []]
