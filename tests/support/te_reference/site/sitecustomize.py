"""Found by Python at start where ``te_reference.environment()`` is in force."""

from tests.support.te_reference.loading import register

register()
