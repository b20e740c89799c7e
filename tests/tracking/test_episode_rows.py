from rllm_lightning.tracking.episode_rows import COLUMNS, advantage_of, episode_rows, prompt_of, shorten
from rllm_lightning.types import Episode, Step, Trajectory


def test_each_model_call_is_a_row(make_episode):
    judge = Trajectory(name="judge", reward=0.5, steps=[Step(model_response="a"), Step(model_response="b", advantage=0.25)])
    episode = make_episode()
    episode.trajectories.append(judge)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in episode_rows([episode])]
    assert [(row["role"], row["response"], row["reward"], row["advantage"]) for row in rows] == [
        ("solver", "2", 1.0, 0.5),
        ("judge", "a", 0.5, None),
        ("judge", "b", 0.5, 0.25),
    ]


def test_long_tables_and_long_texts_are_cut_and_say_so(make_episode):
    rows = episode_rows([make_episode(rollout=k, response="x" * 12) for k in range(5)], max_rows=2, max_characters=10)
    assert len(rows) == 3
    assert rows[0][COLUMNS.index("response")] == "x" * 10 + "… [2 more characters]"
    assert rows[2][0] == "… 3 more rows"
    assert len(rows[2]) == len(COLUMNS)


def test_an_episode_without_calls_has_no_row():
    assert episode_rows([Episode(id="a:0")]) == []


def test_the_prompt_is_the_chat_before_the_answer():
    system, user, answer = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
    assert prompt_of(Step(chat_completions=[user, answer])) == "user"
    assert prompt_of(Step(chat_completions=[system, user, answer])) == "[system] system\n\n[user] user"
    assert prompt_of(Step(chat_completions=[user])) == "user"
    assert prompt_of(Step()) == ""


def test_an_advantage_a_token_is_shown_as_its_mean():
    assert [advantage_of(Step(advantage=value)) for value in ([1.0, 2.0], [], 0.5, None)] == [1.5, None, 0.5, None]


def test_text_within_the_limit_is_whole():
    assert (shorten("12345", 5), shorten("123456", 5)) == ("12345", "12345… [1 more characters]")
