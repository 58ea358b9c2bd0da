"""The program that type checkers look at does what its types say."""

import typed_program


def test_the_typed_program_runs(capsys):
    typed_program.main()
    assert capsys.readouterr().out == "types: passed\n"
