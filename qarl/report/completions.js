// The browser of completions: choose run, step, prompt and order; see one completion token by token.
(() => {
  const { floor, ngram, runs } = JSON.parse(document.getElementById("completions").textContent);
  const root = document.getElementById("browser");
  const ORDERS = {
    "as sampled": (a, b) => a.place - b.place,
    "reward, lowest first": (a, b) => worth(a) - worth(b),
    "reward, highest first": (a, b) => worth(b) - worth(a),
    "error tokens, most first": (a, b) => b.errors.length - a.errors.length,
    "length, longest first": (a, b) => b.length - a.length,
  };
  const worth = (one) => one.reward ?? -Infinity;

  function make(tag, className, ...children) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    element.append(...children);
    return element;
  }

  function chooser(title) {
    const select = make("select");
    controls.append(make("label", "", title, select));
    return select;
  }

  function offer(select, options, keep) {
    const before = select.value;
    select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    if (keep && options.some(([value]) => String(value) === before)) select.value = before;
  }

  const controls = make("div", "controls");
  const [runs_, steps, prompts, orders] = ["Run", "Step", "Prompt", "Order"].map(chooser);
  const list = make("ol", "list");
  const detail = make("article", "detail");
  root.append(controls, list, detail);

  const run = () => runs[runs_.value];
  const step = () => run().steps[steps.value];
  const brief = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text).replace(/\s+/g, " ");
  const number = (value) => (value === null ? "none" : String(Number(value.toPrecision(4))));
  const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

  function content(one) {
    return one.text ?? one.ids.map((id) => run().texts[id]).join("");
  }

  // What all prompts begin and end with, such as a chat's frame, tells none of them from another.
  function tellingPart(texts) {
    if (texts.length < 2) return (text) => text;
    const [first] = texts;
    let start = 0, end = 0;
    while (start < first.length && texts.every((text) => text[start] === first[start])) start++;
    const room = Math.min(...texts.map((text) => text.length)) - start;
    while (end < room && texts.every((text) => text.at(-1 - end) === first.at(-1 - end))) end++;
    start = first.lastIndexOf("\n", start - 1) + 1;
    return (text) => text.slice(start, text.length - end) || text;
  }

  function showSteps() {
    offer(steps, run().steps.map((one, place) => [place, `${one.step} (${one.completions.length} of ${one.total})`]), false);
    showPrompts();
  }

  function showPrompts() {
    const asked = [...new Set(step().completions.map((one) => one.prompt))];
    const part = tellingPart(asked.map((place) => run().prompts[place][1]));
    offer(prompts, [["all", `all ${asked.length}`], ...asked.map((place) => [place, brief(part(run().prompts[place][1]), 60)])], true);
    showList();
  }

  function showList() {
    const chosen = step().completions
      .filter((one) => prompts.value === "all" || String(one.prompt) === prompts.value)
      .sort((a, b) => ORDERS[orders.value](a, b) || a.place - b.place);
    list.replaceChildren(...chosen.map((one) => {
      const errors = one.errors.length ? ` · ${plural(one.errors.length, "error token")}` : "";
      const facts = `reward ${number(one.reward)} · ${plural(one.length, "token")} · ${one.finish}${errors}`;
      const button = make("button", "", make("span", "facts", facts), make("span", "start", brief(content(one), 120) || "(no text)"));
      button.type = "button";
      button.onclick = () => {
        list.querySelectorAll("button").forEach((other) => other.setAttribute("aria-current", String(other === button)));
        showOne(one);
      };
      return make("li", "", button);
    }));
    list.querySelector("button").click();
    list.scrollTop = 0;
  }

  function showOne(one) {
    const terms = Object.entries(one.terms).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    const facts = [
      `reward ${number(one.reward)} (${terms})`, one.finish === "length" ? "cut at the length limit" : `ended by ${one.finish}`,
      plural(one.length, "token"), plural(one.errors.length, "error token"),
      one.onset === null ? `no ${ngram}-gram repeats` : `repeats from token ${one.onset + 1} on`,
      ...(one.trained ? [] : ["not trained on"]),
    ];
    const prompt = make("details", "", make("summary", "", `Prompt ${run().prompts[one.prompt][0]}`), make("div", "prompt code", run().prompts[one.prompt][1]));
    detail.replaceChildren(
      make("h3", "", `Step ${step().step}, completion ${one.place + 1} of ${step().total}`),
      make("p", "note", facts.join(" · ")), prompt,
      ...(one.ids ? tokenView(one) : []),
      ...(one.text === undefined ? [] : [...(one.ids ? [make("p", "note", "Signs of several tokens, decoded together:")] : []), make("div", "text code", one.text)]),
    );
  }

  function tokenView(one) {
    const facts = make("p", "token-facts", "Point at a token, or touch it, for its probability.");
    const view = make("div", "tokens code");
    let picked = null;
    one.ids.forEach((id, place) => {
      if (place === one.onset) view.append(make("span", "onset", "⟲"));
      const token = make("span", one.errors.includes(place) ? "error" : "", ...visible(run().texts[id]));
      const share = Math.min(1, one.logprobs[place] / floor);
      token.style.background = `color-mix(in srgb, var(--heat) ${Math.round(85 * share)}%, transparent)`;
      token.dataset.place = place;
      token.title = words(one, place);
      view.append(token);
    });
    const pick = (event) => {
      const token = event.target.closest("[data-place]");
      if (!token) return;
      picked?.classList.remove("picked");
      picked = token;
      token.classList.add("picked");
      facts.textContent = words(one, Number(token.dataset.place));
    };
    view.addEventListener("pointerover", pick);
    view.addEventListener("click", pick);
    const key = make("p", "note", "probability 1", make("span", "scale"), `${Number(Math.exp(floor).toPrecision(1))} and less, which makes an `);
    const sample = make("span", "tokens", make("span", "error", "error token"));
    key.append(sample);
    if (one.onset !== null) key.append(`; ${ngram} tokens that occurred before follow `, make("span", "onset", "⟲"));
    return [key, facts, view];
  }

  function words(one, place) {
    const id = one.ids[place], logprob = one.logprobs[place];
    const kind = one.errors.includes(place) ? ", an error token" : "";
    return `token ${place + 1} of ${one.length}${kind}: ${JSON.stringify(run().texts[id])}, id ${id}, ` +
      `probability ${Number(Math.exp(logprob).toPrecision(3))}, log-probability ${logprob}`;
  }

  // Line ends are seen, and still end the line; a token without any text has a place to point at.
  function visible(text) {
    if (text === "") return [make("span", "control-sign", "∅")];
    return text.split(/(\n)/).filter((part) => part !== "").map((part) => (part === "\n" ? make("span", "control-sign", "⏎\n") : part));
  }

  offer(runs_, runs.map((one, place) => [place, one.name]), false);
  offer(orders, Object.keys(ORDERS).map((name) => [name, name]), false);
  runs_.onchange = showSteps;
  steps.onchange = showPrompts;
  prompts.onchange = showList;
  orders.onchange = showList;
  showSteps();
})();
