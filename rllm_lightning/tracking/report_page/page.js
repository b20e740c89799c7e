"use strict";
// The trajectory browser of a run's report. Its data (rollout_groups.py says what it holds) stands in the page; where the reader is (filters,
// group, open folds) stands in the address, so that it outlives loading the page anew. Text of the run only ever becomes a text node.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const MAX_LISTED = 300;
  const FILTERS = ["mode", "step", "role", "end", "task", "low", "high", "shade"];
  const byId = (id) => document.getElementById(id);
  const state = new URLSearchParams(location.hash.slice(1));
  const keyOf = (group) => JSON.stringify([group.mode, group.step, group.task, group.role]);
  const groups = data.groups.map((group, index) => ({ ...group, key: keyOf(group), index }));
  let shown = []; // the groups that pass the filters

  // ------------------------------------------------------------------------------------------------------------ small helpers

  function element(tag, className, ...content) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...content.filter((part) => part !== null && part !== undefined)); // strings become text nodes
    return made;
  }

  const number = (value, digits = 3) =>
    value === null || value === undefined ? "–" : String(Number(value.toPrecision(digits))).replace("-", "−");

  const signed = (value) => (value > 0 ? "+" : "") + number(value);

  function remember(name, value) {
    if (value === "" || value === null) state.delete(name);
    else state.set(name, value);
    history.replaceState(null, "", `#${state}`);
  }

  // ----------------------------------------------------------------------------------------------------------------- filters

  function fill(id, values, name = (value) => value) {
    const select = byId(id);
    select.append(new Option("all", ""));
    for (const value of values) select.append(new Option(name(value), value));
  }

  const distinct = (values) => [...new Set(values)];

  function fillFilters() {
    const numbers = distinct(groups.map((group) => group.step)).sort((a, b) => a - b);
    fill("mode", distinct(groups.map((group) => group.mode)));
    fill("step", numbers.map(String));
    fill("role", distinct(groups.map((group) => group.role)).filter(Boolean).sort());
    fill("end", distinct(groups.flatMap((group) => group.members.map((member) => member.end))).sort(), (end) => end.replaceAll("_", " "));
    for (const id of FILTERS) {
      const control = byId(id);
      if (state.has(id)) control.value = state.get(id);
      if (control.selectedIndex === -1) control.selectedIndex = 0; // a value that is no longer there
      for (const kind of ["input", "change"]) {
        control.addEventListener(kind, () => {
          remember(id, control.value);
          update();
        });
      }
    }
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("filters").addEventListener("reset", () => setTimeout(() => {
      FILTERS.forEach((id) => remember(id, ""));
      update();
    }));
  }

  const chosen = (id) => byId(id).value;

  function passes(group) {
    return (
      (!chosen("mode") || group.mode === chosen("mode")) &&
      (!chosen("step") || String(group.step) === chosen("step")) &&
      (!chosen("role") || group.role === chosen("role")) &&
      group.task.toLowerCase().includes(chosen("task").toLowerCase()) &&
      group.members.some(memberPasses)
    );
  }

  function memberPasses(member) {
    const [low, high] = [chosen("low"), chosen("high")];
    return (
      (!chosen("end") || member.end === chosen("end")) &&
      (low === "" || (member.reward !== null && member.reward >= Number(low))) &&
      (high === "" || (member.reward !== null && member.reward <= Number(high)))
    );
  }

  // -------------------------------------------------------------------------------------------------------------------- list

  function update() {
    shown = groups.filter(passes).reverse(); // the newest first
    const numMembers = shown.reduce((sum, group) => sum + group.members.filter(memberPasses).length, 0);
    byId("count").textContent = `${shown.length} of ${groups.length} groups, ${numMembers} trajectories`;
    const current = currentGroup();
    byId("list").replaceChildren(...shown.slice(0, MAX_LISTED).map((group) => listed(group, group === current)));
    if (shown.length > MAX_LISTED) byId("list").append(element("li", "soft", `and ${shown.length - MAX_LISTED} more: narrow the filters`));
    const pinned = groups.find((group) => group.key === state.get("pin"));
    byId("panes").replaceChildren(...[pinned, current].filter((group, k) => group && (k === 0 || group !== pinned)).map(pane));
    byId("panes").className = pinned && current && pinned !== current ? "two" : "";
  }

  const currentGroup = () => shown.find((group) => group.key === state.get("group")) ?? shown[0];

  function listed(group, isCurrent) {
    const title = element("span", "task", group.task);
    const rewards = group.members.map((member) => member.reward).filter((reward) => reward !== null);
    const mean = rewards.length ? `mean ${number(rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length)}` : "";
    const about = element("span", "soft", [`${group.mode} ${group.step}`, group.role, mean].filter(Boolean).join(" · "));
    const button = element("button", "", title, about, bars(group));
    button.type = "button";
    if (isCurrent) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => go(group));
    return element("li", "", button);
  }

  function bars(group) {
    const advantages = group.members.map((member) => member.advantage);
    const isAdvantage = advantages.some((value) => value !== null);
    const values = isAdvantage ? advantages : group.members.map((member) => member.reward);
    const top = Math.max(1e-9, ...values.map((value) => Math.abs(value ?? 0)));
    const strip = element("span", isAdvantage ? "bars" : "bars rewards");
    for (const value of values) {
      const bar = element("i", value > 0 ? "up" : value < 0 ? "down" : "zero");
      bar.style.setProperty("--part", Math.abs(value ?? 0) / top);
      strip.append(bar);
    }
    strip.setAttribute("role", "img");
    strip.setAttribute("aria-label", `${isAdvantage ? "advantages" : "rewards"} ${values.map((value) => number(value)).join(", ")}`);
    return strip;
  }

  function go(group, focus = false) {
    remember("group", group.key);
    const list = byId("list");
    const scrolled = list.scrollTop;
    update();
    list.scrollTop = scrolled;
    const button = list.querySelector("[aria-current]");
    button?.scrollIntoView({ block: "nearest" });
    if (focus || document.activeElement === document.body) button?.focus({ preventScroll: true });
  }

  byId("list")?.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = shown[shown.indexOf(currentGroup()) + by];
    if (next) go(next, true);
  });

  // ------------------------------------------------------------------------------------------------------------------- group

  function pane(group) {
    const isPinned = state.get("pin") === group.key;
    const pin = element("button", "", isPinned ? "unpin" : "pin, to compare");
    pin.type = "button";
    pin.addEventListener("click", () => {
      remember("pin", isPinned ? "" : group.key);
      update();
    });
    const about = [group.mode, `step ${group.step}`, group.role].filter(Boolean).join(" · ");
    const made = element("section", "pane", element("header", "", element("h3", "", group.task), element("span", "soft", about), pin));
    const scale = scaleOf(group);
    const sharedPrompt = promptOfAll(group);
    if (sharedPrompt !== null) made.append(element("pre", "prompt", group.prompts[sharedPrompt]));
    made.append(legend(scale));
    const inspector = element("output", "inspector", "point at a token, or walk over them with ← and →");
    const cards = group.members.filter((member) => member.calls !== null).map((member) => card(group, member, scale, sharedPrompt, inspector));
    made.append(inspector, element("div", "cards", ...cards));
    const numbersOnly = group.members.filter((member) => member.calls === null);
    if (numbersOnly.length) made.append(numbersTable(numbersOnly, cards.length));
    if (group.num > group.members.length) made.append(element("p", "soft", `and ${group.num - group.members.length} more trajectories`));
    return made;
  }

  /** The place of the prompt that all of a group's trajectories begin with; null where there are several. */
  function promptOfAll(group) {
    const first = distinct(group.members.filter((member) => member.calls?.length).map((member) => member.calls[0].prompt));
    return first.length === 1 ? first[0] : null;
  }

  function card(group, member, scale, sharedPrompt, inspector) {
    const reward = element("b", "", `reward ${number(member.reward)}`);
    const advantage = element("span", "advantage", member.advantage === null ? "no advantage" : `advantage ${signed(member.advantage)}`);
    if (member.advantage !== null) shade(advantage, member.advantage, scale.advantage);
    const mark = element("span", member.correct ? "badge correct" : "badge wrong", member.correct ? "✓ correct" : "✗ wrong");
    const facts = element("p", "soft", `rollout ${member.id} · ${member.tokens} tokens · ${member.end.replaceAll("_", " ")}`);
    const made = element("article", memberPasses(member) ? "" : "other", element("header", "", reward, advantage, mark), facts);
    member.calls.forEach((call, k) => {
      if (k > 0 || call.prompt !== sharedPrompt) made.append(element("pre", "prompt", group.prompts[call.prompt]));
      made.append(response(call, scale, inspector));
    });
    if (member.omitted) made.append(element("p", "soft", `and ${member.omitted} more model calls`));
    if (member.error) made.append(element("pre", "error", member.error));
    return made;
  }

  function numbersTable(members, numFull) {
    const rows = members.map((member) =>
      element("tr", "", ...[member.id, number(member.reward), number(member.advantage), member.tokens, member.end].map((cell) => element("td", "", String(cell)))),
    );
    const head = element("tr", "", ...["rollout", "reward", "advantage", "tokens", "ended as"].map((name) => element("th", "", name)));
    const title = `the other ${members.length} in numbers (the text of the first ${numFull} is kept)`;
    return element("details", "", element("summary", "", title), element("div", "wide", element("table", "", head, ...rows)));
  }

  // ------------------------------------------------------------------------------------------------------------------ tokens

  /** The largest advantage and gap of a group, in size: full colour. */
  function scaleOf(group) {
    const scale = { advantage: 0, gap: 0, hasGap: false };
    for (const call of group.members.flatMap((member) => member.calls ?? [])) {
      for (const value of [call.advantage].flat()) scale.advantage = Math.max(scale.advantage, Math.abs(value ?? 0));
      for (const value of call.gap ?? []) scale.gap = Math.max(scale.gap, Math.abs(value ?? 0));
      scale.hasGap ||= call.gap !== undefined;
    }
    return scale;
  }

  function shade(node, value, top) {
    if (!value || !top) return;
    node.classList.add(value > 0 ? "up" : "down");
    node.style.setProperty("--part", Math.min(1, Math.abs(value) / top));
  }

  function valueOf(call, k, kind) {
    if (kind === "gap") return call.gap?.[k] ?? null;
    if (kind === "none") return null;
    return Array.isArray(call.advantage) ? (call.advantage[k] ?? null) : call.advantage;
  }

  function response(call, scale, inspector) {
    const kind = chosen("shade");
    const made = element("pre", "response");
    if (!call.tokens) {
      const whole = element("span", "", call.text);
      if (kind === "advantage" && !Array.isArray(call.advantage)) shade(whole, call.advantage, scale.advantage);
      made.append(whole);
      return made;
    }
    const tokens = call.tokens.map((text, k) => {
      const token = element("span", "token", text);
      shade(token, valueOf(call, k, kind), kind === "gap" ? scale.gap : scale.advantage);
      return token;
    });
    made.append(...tokens);
    if (call.more) made.append(element("span", "soft", `… [${call.more} more tokens]`));
    made.tabIndex = 0;
    let active = -1;
    const look = (k) => {
      tokens[active]?.classList.remove("active");
      active = k;
      tokens[active].classList.add("active");
      const values = [["advantage", valueOf(call, k, "advantage")], ["trainer − sampler", valueOf(call, k, "gap")]];
      const known = values.filter(([, value]) => value !== null).map(([name, value]) => `${name} ${signed(value)}`);
      inspector.textContent = [`token ${k + 1} of ${tokens.length + call.more}: ${JSON.stringify(call.tokens[k])}`, ...known].join(" · ");
    };
    made.addEventListener("mouseover", (event) => {
      const k = tokens.indexOf(event.target);
      if (k >= 0) look(k);
    });
    made.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by || !tokens.length) return;
      event.preventDefault();
      look(Math.min(tokens.length - 1, Math.max(0, active + by)));
    });
    return made;
  }

  function legend(scale) {
    const kind = chosen("shade");
    if (kind === "none") return element("p", "legend");
    if (kind === "gap" && !scale.hasGap) return element("p", "legend soft", "The trainer's log-probs of these tokens were not recorded.");
    const top = kind === "gap" ? scale.gap : scale.advantage;
    if (!top) return element("p", "legend soft", kind === "gap" ? "Trainer and sampler agree." : "No advantage but zero.");
    const [below, above] = kind === "gap" ? ["less likely to the trainer", "likelier to the trainer"] : ["made less likely", "made likelier"];
    const ramp = element("span", "ramp");
    ramp.setAttribute("aria-hidden", "true");
    return element("p", "legend soft", `${below} −${number(top)} `, ramp, ` +${number(top)} ${above}`);
  }

  // --------------------------------------------------------------------------------------------------- folds, loading anew

  const names = new Set(state.getAll("open"));
  for (const fold of document.querySelectorAll("details[data-name]")) {
    fold.open = names.has(fold.dataset.name);
    fold.addEventListener("toggle", () => {
      if (fold.open) names.add(fold.dataset.name);
      else names.delete(fold.dataset.name);
      state.delete("open");
      names.forEach((name) => state.append("open", name));
      history.replaceState(null, "", `#${state}`);
    });
  }

  if (byId("filters") && groups.length) {
    fillFilters();
    update();
    const current = byId("list").querySelector("[aria-current]");
    if (current) byId("list").scrollTop = current.offsetTop - 4;
  }

  const focused = state.get("focus");
  remember("focus", "");
  if (focused === "list") byId("list")?.querySelector("[aria-current]")?.focus({ preventScroll: true });
  else if (focused) byId(focused)?.focus({ preventScroll: true });

  if (data.reload) {
    let lastTouched = 0;
    for (const kind of ["keydown", "pointerdown", "pointermove", "wheel"]) addEventListener(kind, () => (lastTouched = Date.now()), { passive: true });
    setInterval(() => {
      // not under a reader's hands, nor while text is marked
      if (Date.now() - lastTouched < 3000 || !getSelection().isCollapsed) return;
      remember("focus", byId("list")?.contains(document.activeElement) ? "list" : document.activeElement.id);
      location.reload();
    }, data.reload * 1000);
  }
})();
