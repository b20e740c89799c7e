"""The report in a real browser: filters, shading, keyboard, loading anew, and that nothing a model wrote is ever run."""

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from rllm_lightning.tracking.episode_logger import EpisodeLogger
from rllm_lightning.tracking.metrics_table import MetricsTable
from rllm_lightning.tracking.report import Report, write_report
from rllm_lightning.tracking.run_directory import RunDirectory
from rllm_lightning.tracking.summary import RunSummary
from rllm_lightning.types import Episode, Step, TerminationReason, Trajectory
from tests.tracking.browser import console_of, requests_of, start_browser

PLANTED = [
    "<script>window.planted = 1</script>",
    "</script><script>window.planted = 1</script>",
    "<img src=x onerror='window.planted = 1'>",
    "<!--<script>",
    "javascript:window.planted=1",
    "\"><svg onload='window.planted = 1'>",
    "__proto__",
]
VOCABULARY = {1: "right", 2: " answer", 3: "wrong", 4: "<script>window.planted = 1</script>"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = start_browser(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


def rollout(
    task, k, role="solver", reward=1.0, advantage=0.5, tokens=(1, 2), gap=(0.0, 0.1), prompt="1+1=?", reason=TerminationReason.ENV_DONE
):
    """One answer whose tokens the trainer finds likelier than the sampler did by `gap`."""
    text = "".join(VOCABULARY[i] for i in tokens)
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    old = [-1.0 + difference for difference in gap]
    step = Step([9], list(tokens), [-1.0] * len(tokens), chat, model_response=text, advantage=advantage, info={"old_logprobs": old})
    return Episode(f"{task}:{k}", None, reason, reward > 0, [Trajectory(name=role, steps=[step], reward=reward)])


def texts_of(ids):
    return [VOCABULARY[i] for i in ids]


@pytest.fixture
def page(run, config):
    """A run of two steps: task `sum` with two rewards in both, task `word` with a judge in the second."""
    summary = RunSummary(run, config)
    summary.begin()
    MetricsTable(run.metrics_csv).append(1, {"reward/solver/mean": 0.5, "val/a/pass@1": 0.25})
    logger = EpisodeLogger(run.episodes, texts_of)
    pair = [rollout("sum", 0), rollout("sum", 1, reward=0.0, advantage=[-0.5, -1.0], tokens=(3, 2), gap=(-0.2, 0.0))]
    logger.log(pair, "train", 1)
    late = rollout("word", 0, "judge", 0.25, reason=TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED)
    logger.log([*pair, late], "train", 2)
    summary.finish("done")
    return write_report(run)


def opened(browser, page, fragment=""):
    browser.get("about:blank")
    console_of(browser), requests_of(browser)
    browser.get(f"{page.as_uri()}{fragment}")
    return browser


def listed(browser):
    """Task and line of every group in the list, read in one go: the list may be built anew between two calls."""
    texts = browser.execute_script("return [...document.querySelectorAll('#list button')].map(button => button.innerText)")
    return [text.split("\n")[:2] for text in texts]


def cards(browser):
    return browser.find_elements(By.CSS_SELECTOR, ".pane article")


def choose(browser, name, value):
    Select(browser.find_element(By.ID, name)).select_by_value(value)


ALL = [["word", "train 2 · judge · mean 0.25"], ["sum", "train 2 · solver · mean 0.5"], ["sum", "train 1 · solver · mean 0.5"]]


def test_every_filter_leaves_the_groups_that_it_names(browser, page):
    opened(browser, page)
    assert sorted(listed(browser)) == sorted(ALL)
    for name, value, expected in [
        ("step", "1", [["sum", "train 1 · solver · mean 0.5"]]),
        ("role", "judge", [["word", "train 2 · judge · mean 0.25"]]),
        ("end", "max_response_length_exceeded", [["word", "train 2 · judge · mean 0.25"]]),
        ("mode", "train", ALL),
    ]:
        choose(browser, name, value)
        assert sorted(listed(browser)) == sorted(expected), name
        choose(browser, name, "")
    for name, text, expected in [("task", "WO", 1), ("low", "0.2", 3), ("high", "0.2", 2), ("high", "-1", 0)]:
        field = browser.find_element(By.ID, name)
        field.send_keys(text)
        assert len(listed(browser)) == expected, name
        field.clear()

    assert browser.find_element(By.ID, "count").text == "3 of 3 groups, 5 trajectories"
    choose(browser, "step", "1")
    browser.find_element(By.CSS_SELECTOR, "#filters button").click()
    WebDriverWait(browser, 20).until(lambda _: len(listed(browser)) == 3)
    assert "step" not in browser.current_url


def test_a_group_shows_its_answers_side_by_side_with_rewards_and_advantages(browser, page):
    opened(browser, page, "#step=1")
    first, second = (card.text for card in cards(browser))
    assert "reward 1" in first
    assert "advantage +0.5" in first
    assert "right answer" in first
    assert "✓ correct" in first
    assert "reward 0" in second
    assert "advantage −0.75" in second  # the mean of -0.5 and -1
    boxes = [card.rect for card in cards(browser)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] < boxes[1]["x"]
    assert browser.find_element(By.CSS_SELECTOR, ".pane > .prompt").text == "1+1=?"


def test_tokens_are_shaded_by_what_the_switch_says(browser, page):
    """Advantages 0.5, 0.5 and -0.5, -1; gaps 0, 0.1 and -0.2, 0: a sign is a class, a part of the group's largest its depth."""
    opened(browser, page, "#step=1")

    def shades():
        tokens = browser.find_elements(By.CSS_SELECTOR, ".token")
        found = [
            (t.get_attribute("class").split()[1:], browser.execute_script("return arguments[0].style.getPropertyValue('--part')", t))
            for t in tokens
        ]
        return [(" ".join(kind), part) for kind, part in found]

    assert shades() == [("up", "0.5"), ("up", "0.5"), ("down", "0.5"), ("down", "1")]
    background = browser.execute_script("return [...document.querySelectorAll('.token')].map(t => getComputedStyle(t).backgroundColor)")
    assert len(set(background)) == 3
    choose(browser, "shade", "gap")
    assert shades() == [("", ""), ("up", "0.5"), ("down", "1"), ("", "")]
    choose(browser, "shade", "none")
    assert {kind for kind, _ in shades()} == {""}


def test_tokens_and_groups_can_be_walked_with_the_keyboard(browser, page):
    opened(browser, page)
    before = listed(browser)
    first = browser.find_element(By.CSS_SELECTOR, "#list button")
    first.send_keys(Keys.ARROW_DOWN)
    assert browser.switch_to.active_element.text.split("\n")[:2] == before[1]
    assert browser.find_element(By.CSS_SELECTOR, ".pane h3").text == before[1][0]
    response = browser.find_element(By.CSS_SELECTOR, ".response")
    response.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.find_element(By.CSS_SELECTOR, ".inspector").text == 'token 2 of 2: " answer" · advantage +0.5 · trainer − sampler +0.1'


def test_a_pinned_group_stays_beside_the_next_one(browser, page):
    opened(browser, page, "#step=2")
    browser.find_element(By.CSS_SELECTOR, ".pane header button").click()
    browser.find_elements(By.CSS_SELECTOR, "#list button")[1].click()
    left, right = browser.find_elements(By.CSS_SELECTOR, ".pane")
    assert left.rect["y"] == right.rect["y"]
    assert {left.find_element(By.TAG_NAME, "h3").text, right.find_element(By.TAG_NAME, "h3").text} == {"sum", "word"}


def test_a_page_of_a_running_run_loads_itself_anew_and_stays_where_the_reader_is(browser, page, run):
    report = Report(run)
    report.write(reload_s=0.5)
    opened(browser, page, "#step=1&shade=gap&open=config.yaml")
    EpisodeLogger(run.episodes, texts_of).log([rollout("new", 0)], "train", 3)
    report.write()  # the run has ended: once this is loaded, the page stays
    count = "return document.readyState === 'complete' && document.getElementById('count').textContent"
    loading_anew = [WebDriverException]  # a script that the next loading cuts off
    WebDriverWait(browser, 20, ignored_exceptions=loading_anew).until(lambda b: b.execute_script(count) == "1 of 4 groups, 2 trajectories")
    assert Select(browser.find_element(By.ID, "shade")).first_selected_option.get_attribute("value") == "gap"
    assert browser.find_element(By.CSS_SELECTOR, "[data-name='config.yaml']").get_attribute("open")


def test_nothing_that_a_model_or_a_task_wrote_is_run_or_fetched(browser, make_config):
    """Planted in prompts, answers, tokens, task ids, roles, errors, metrics and the names of the run; every group is looked at."""
    run = RunDirectory.create(make_config(**{"rllm.trainer.experiment_name": PLANTED[1], "wandb.notes": PLANTED[1]}))
    MetricsTable(run.metrics_csv).append(1, {f"val/{text}/pass@1": 0.5 for text in PLANTED} | dict.fromkeys(PLANTED, 1.0))
    episodes = []
    for text in PLANTED:
        episodes.append(rollout(text, 0, role=text, prompt=text, tokens=(4, 1)))
        plain = rollout(text, 1, role=text, prompt=text, tokens=(1, 2))
        plain.trajectories[0].steps[0].response_ids = [1, 77]  # a token without text: the answer is shown as a whole
        plain.trajectories[0].steps[0].model_response = text
        plain.trajectories[0].steps[0].advantage = 0.25
        failed = Episode(f"{text}:2", termination_reason=TerminationReason.ERROR, info={"error": {text: text}})
        episodes += [plain, failed]
    EpisodeLogger(run.episodes, lambda ids: [VOCABULARY.get(i, PLANTED[1]) for i in ids]).log(episodes, "train", 1)
    opened(browser, write_report(run))
    for k in range(len(browser.find_elements(By.CSS_SELECTOR, "#list button"))):
        browser.find_elements(By.CSS_SELECTOR, "#list button")[k].click()
        assert browser.find_element(By.CSS_SELECTOR, ".pane h3").text
    for value in ("gap", "none"):
        choose(browser, "shade", value)
    for fold in browser.find_elements(By.CSS_SELECTOR, "summary"):
        fold.click()
    shown = {button.find_element(By.CSS_SELECTOR, ".task").text for button in browser.find_elements(By.CSS_SELECTOR, "#list button")}
    assert shown == set(PLANTED)
    assert browser.execute_script("return window.planted") is None
    assert browser.execute_script("return document.scripts.length") == 2
    assert not browser.find_elements(By.CSS_SELECTOR, "img, iframe, object, [onerror], [onload]")
    assert not browser.find_elements(By.CSS_SELECTOR, "main a[href]")
    assert console_of(browser) == []
    assert requests_of(browser) == []


def test_the_policy_runs_no_script_but_the_page_s_own(browser, page):
    """Were one to get into the page after all, it would not run."""
    page.write_text(
        page.read_text().replace("</main>", "<script>window.planted = 1</script><img src=x onerror='window.planted = 1'></main>")
    )
    opened(browser, page)
    assert browser.execute_script("return window.planted") is None
    assert any("Content Security Policy" in message for message in console_of(browser))
    assert len(listed(browser)) == 3


@pytest.mark.parametrize("is_bare", [True, False])
def test_a_run_without_episodes_has_a_page_without_errors(browser, run, is_bare):
    if not is_bare:
        MetricsTable(run.metrics_csv).append(1, {"reward/solver/mean": 0.5})
    opened(browser, write_report(run))
    assert "No episodes were written." in browser.find_element(By.TAG_NAME, "main").text
    assert console_of(browser) == []
