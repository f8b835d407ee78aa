# Copyright 2026 The trl_multiagent authors. Licensed under the Apache License, Version 2.0.
"""Masks and the reductions over them, against numbers counted by hand."""

import pytest
import torch

from trl_multiagent.functional.masking import last_token_index, masked_mean, pad_on_the_right


NAN = float("nan")


class TestLastTokenIndex:
    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ([1, 1, 1, 1], 3),
            ([1, 1, 0, 0], 1),  # padded on the right
            ([0, 0, 1, 1], 3),  # padded on the left
            ([0, 1, 1, 0], 2),
            ([1, 0, 1, 0], 2),  # a gap in the middle
            ([1, 0, 0, 0], 0),
            ([0, 0, 0, 0], 0),
        ],
    )
    def test_it_is_the_last_kept_position_on_whichever_side_the_padding_is(self, row, expected):
        assert last_token_index(torch.tensor([row])).tolist() == [expected]

    def test_each_row_has_its_own(self):
        mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0]])
        result = last_token_index(mask)
        assert result.tolist() == [1, 2, 0, 0]
        assert result.dtype == torch.long

    def test_bool_and_integer_masks_agree(self):
        mask = torch.tensor([[True, True, False], [False, True, False]])
        assert torch.equal(last_token_index(mask), last_token_index(mask.long()))

    @pytest.mark.parametrize("shape", [(3,), (2, 3, 1), ()])
    def test_another_rank_is_an_error_that_names_the_shape(self, shape):
        with pytest.raises(ValueError, match=r"\(B, T\)"):
            last_token_index(torch.ones(shape))


class TestPadOnTheRight:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.long])
    def test_kept_tokens_come_first_in_their_order(self, dtype):
        ids = torch.tensor([[1, 1, 5, 6, 7], [8, 1, 9, 1, 4], [3, 2, 1, 1, 1], [1, 1, 1, 1, 1]])
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=dtype)
        padded, kept = pad_on_the_right(ids, mask)
        assert padded.shape == (4, 3)  # as long as the longest row
        assert [row[row_mask.bool()].tolist() for row, row_mask in zip(padded, kept, strict=True)] == [
            [5, 6, 7],
            [8, 9],
            [3, 2],
            [],
        ]
        assert kept.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0], [0, 0, 0]]
        assert kept.dtype == torch.long and padded.dtype == ids.dtype

    @pytest.mark.parametrize("seed", range(3))
    def test_it_is_a_filter_of_each_row(self, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(100, (20, 40), generator=generator)
        mask = torch.rand(20, 40, generator=generator) < 0.5
        padded, kept = pad_on_the_right(ids, mask)
        rows = [
            [token for token, keep in zip(*row, strict=True) if keep]
            for row in zip(ids.tolist(), mask.tolist(), strict=True)
        ]
        assert padded.size(1) == max(map(len, rows))
        for row, result, row_mask in zip(rows, padded.tolist(), kept.tolist(), strict=True):
            assert result[: len(row)] == row
            assert row_mask == [1] * len(row) + [0] * (padded.size(1) - len(row))

    def test_nothing_kept_leaves_no_columns(self):
        padded, kept = pad_on_the_right(torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3))
        assert padded.shape == kept.shape == (2, 0)

    def test_its_arguments_are_left_alone(self):
        ids, mask = torch.tensor([[1, 5]]), torch.tensor([[0, 1]])
        pad_on_the_right(ids, mask)
        assert ids.tolist() == [[1, 5]] and mask.tolist() == [[0, 1]]

    @pytest.mark.parametrize(("ids", "mask"), [((3,), (3,)), ((2, 3), (2, 2)), ((2, 3, 1), (2, 3, 1))])
    def test_shapes_that_do_not_fit_are_an_error_that_names_them(self, ids, mask):
        with pytest.raises(ValueError, match=r"\(B, T\)") as error:
            pad_on_the_right(torch.ones(ids), torch.ones(mask))
        assert str(ids) in str(error.value) and str(mask) in str(error.value)


class TestMaskedMean:
    def test_it_is_the_mean_over_the_kept_places(self):
        values = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
        mask = torch.tensor([[True, False, True], [False, True, False]])
        assert masked_mean(values, mask).item() == 8.0  # (1 + 3 + 20) / 3

    def test_integer_masks_work(self):
        assert masked_mean(torch.tensor([1.0, 5.0, 9.0]), torch.tensor([1, 1, 0])).item() == 3.0

    @pytest.mark.parametrize("hidden", [NAN, float("inf"), -float("inf"), 1e30])
    def test_what_stands_at_masked_places_changes_neither_the_result_nor_the_gradient(self, hidden):
        values = torch.tensor([1.0, hidden, 4.0], requires_grad=True)
        result = masked_mean(values * 2, torch.tensor([True, False, True]))
        result.backward()
        assert result.item() == 5.0
        assert values.grad.tolist() == [1.0, 0.0, 1.0]

    def test_an_empty_mask_gives_zero_attached_to_the_graph(self):
        values = torch.tensor([1.0, NAN], requires_grad=True)
        result = masked_mean(values, torch.tensor([False, False]))
        assert result.item() == 0.0
        assert result.requires_grad
        result.backward()
        assert values.grad.tolist() == [0.0, 0.0]

    def test_padding_is_inert(self):
        short = masked_mean(torch.tensor([[1.0, 2.0]]), torch.tensor([[1, 1]]))
        padded = masked_mean(torch.tensor([[1.0, 2.0, 99.0, 98.0]]), torch.tensor([[1, 1, 0, 0]]))
        assert short.item() == padded.item() == 1.5

    def test_its_arguments_are_left_alone(self):
        values, mask = torch.tensor([1.0, NAN, 3.0]), torch.tensor([1, 0, 1])
        masked_mean(values, mask)
        assert torch.equal(values[[0, 2]], torch.tensor([1.0, 3.0])) and values[1].isnan()
        assert mask.tolist() == [1, 0, 1]

    @pytest.mark.parametrize(("values", "mask"), [((3,), (2,)), ((2, 3), (3,)), ((2, 1), (2, 3))])
    def test_shapes_that_differ_are_an_error_that_names_them(self, values, mask):
        with pytest.raises(ValueError, match="must agree"):
            masked_mean(torch.ones(values), torch.ones(mask))
