"""The measures of the code's structure that must hold."""

from experiments.structure.run import classes_of_several_meanings


def test_the_name_of_a_public_class_has_one_meaning():
    assert classes_of_several_meanings() == []
