import calgp


def test_every_name_on_the_shelf_is_there():
    for name in calgp.__all__:
        assert getattr(calgp, name) is not None
    assert sorted(calgp.__all__) == sorted(name for names in calgp._ROOMS.values() for name in names)
    assert not hasattr(calgp, "no_such_name")
