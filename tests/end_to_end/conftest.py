import pytest

pytest.register_assert_rewrite("roundtrip_support")
