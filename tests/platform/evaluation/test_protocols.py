import pytest

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.protocols import PROTOCOLS, get_protocol


@pytest.mark.parametrize(
    ("id", "split", "negatives"),
    [
        ("ratio-80-10-10", "ratio-80-10-10", None),
        ("ratio-80-10-10-time", "ratio-80-10-10-time", None),
        ("leave-one-out", "leave-one-out", None),
        ("leave-one-out-99", "leave-one-out", 99),
        ("leave-one-out-999", "leave-one-out", 999),
        ("temporal-cut", "temporal-cut", None),
    ],
)
def test_a_protocol_is_a_split_and_a_candidate_rule(id, split, negatives):
    protocol = get_protocol(id)
    assert (protocol.id, protocol.split, protocol.negatives) == (id, split, negatives)


def test_an_unknown_protocol_names_the_allowed_ones():
    with pytest.raises(CrossfedError) as error:
        get_protocol("leave-two-out")
    assert "leave-two-out" in str(error.value) and all(id in str(error.value) for id in PROTOCOLS)
