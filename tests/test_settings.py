"""The environment's part: each variable means one thing, and what means nothing is an error."""

import pytest

from anyattn import SpecError
from anyattn.settings import VARIABLES, Settings, misspelled_variables


def test_a_role_s_variable_that_names_nothing_leaves_the_role_to_the_common_one():
    for empty in ("", " ", ",", " , "):
        environ = {"ANYATTN_ATTENTION_BACKEND": "reference", "ANYATTN_DECODE_BACKEND": empty}
        settings = Settings.from_env({**environ, "ANYATTN_PREFILL_BACKEND": empty})
        assert (settings.prefill_backend, settings.decode_backends) == ("reference", ("reference",))


def test_names_are_stripped_and_count_once():
    settings = Settings.from_env(
        {"ANYATTN_PREFILL_BACKEND": " a ", "ANYATTN_DECODE_BACKEND": "b, a,b", "ANYATTN_PLATFORM": " cpu"}
    )
    assert (settings.prefill_backend, settings.decode_backends, settings.platform) == ("a", ("b", "a"), "cpu")


@pytest.mark.parametrize(
    "environ",
    [
        {"ANYATTN_ATTENTION_BACKEND": "a,b"},
        {"ANYATTN_PREFILL_BACKEND": "a,b"},
        {"ANYATTN_PAGE_SIZE": "٣٢"},
        {"ANYATTN_PAGE_SIZE": "-1"},
        {"ANYATTN_PAGE_SIZE": "1" * 40},
        {"ANYATTN_STRICT": "yes"},
    ],
    ids=str,
)
def test_what_means_nothing_is_refused(environ):
    with pytest.raises(SpecError, match=next(iter(environ))):
        Settings.from_env(environ)


def test_a_page_size_may_have_blanks_around_it():
    assert Settings.from_env({"ANYATTN_PAGE_SIZE": " 16 "}).page_size == 16


def test_a_misspelled_variable_is_told_with_the_one_that_is_meant_or_with_all():
    (near,) = misspelled_variables({"ANYATTN_ATENTION_BACKEND": "x", "ANYATTN_DEBUG": "1", "PATH": ""})
    assert near.endswith("is ANYATTN_ATTENTION_BACKEND meant?")
    (far,) = misspelled_variables({"ANYATTN_XYZ": "x"})
    assert far.endswith(", ".join(VARIABLES))
