"""What is said of a name that is no recipe."""

import pytest

from gradwire_lab.train.recipe_files import find


def test_a_model_in_the_place_of_a_recipe_is_told_of_its_option() -> None:
    with pytest.raises(ValueError, match="no recipe called 'gpt'; it is a model: write --model gpt"):
        find("gpt")


def test_a_file_in_the_place_of_a_recipe_is_told_of_its_option() -> None:
    with pytest.raises(ValueError, match=r"no recipe called 'mine\.py'; a model .*--model mine\.py:make"):
        find("mine.py")
