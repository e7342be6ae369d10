"""Shared by the tests of the operation."""

from mla_var3.op.mla.inputs import MlaInputs


def wide(inputs: MlaInputs) -> MlaInputs:
    """The same values in float64, in which the projections do not round."""
    return MlaInputs(
        **{name: x if name == "lengths" else x.double() for name, x in vars(inputs).items()}
    )
