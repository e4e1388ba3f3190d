"use strict";
// Texts of samples are written with textContent alone: nothing in them can become markup.
(() => {
  const root = document.documentElement;
  const find = (id) => document.getElementById(id);
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // -- colours: as the system has them, light, or dark
  const THEMES = { system: "◐", light: "☀", dark: "☾" };
  const button = find("theme");
  const setTheme = (name) => {
    if (name === "system") root.removeAttribute("data-theme");
    else root.dataset.theme = name;
    button.textContent = THEMES[name];
    button.dataset.now = name;
    button.setAttribute("aria-label", `Colours: ${name === "system" ? "as the system" : name}`);
    try { localStorage.setItem("draftfleet-theme", name); } catch { /* a file may have no storage */ }
  };
  let kept = null;
  try { kept = localStorage.getItem("draftfleet-theme"); } catch { /* the same */ }
  setTheme(kept in THEMES ? kept : "system");
  button.hidden = false;
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(button.dataset.now) + 1) % names.length]);
  });

  // -- charts: the figures under the pointer, or under the arrow keys, from the table below
  const tip = find("tip");
  for (const figure of document.querySelectorAll(".chart")) {
    const plot = figure.querySelector(".plot");
    const cursor = plot.querySelector(".cursor");
    const canvas = plot.querySelector(".canvas");
    const places = figure.dataset.places.split(",").filter(Boolean).map(Number);
    let at = -1;
    const show = (number) => {
      if (!places.length) return;
      at = Math.max(0, Math.min(places.length - 1, number));
      const names = figure.querySelectorAll("thead th");
      const cells = figure.querySelectorAll("tbody tr")[at].children;
      tip.replaceChildren(make("b", "", `${cells[0].textContent}`));
      for (let column = 1; column < cells.length; column++) {
        const line = make("div");
        line.append(make("span", "", names[column].textContent), make("span", "", cells[column].textContent));
        tip.append(line);
      }
      cursor.setAttribute("x1", `${places[at]}%`);
      cursor.setAttribute("x2", `${places[at]}%`);
      cursor.setAttribute("visibility", "visible");
      tip.hidden = false;
      const box = canvas.getBoundingClientRect();
      const x = box.left + (box.width * places[at]) / 100;
      const left = x + 14 + tip.offsetWidth > window.innerWidth ? x - 14 - tip.offsetWidth : x + 14;
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.max(4, box.top + 8)}px`;
    };
    const hide = () => {
      tip.hidden = true;
      cursor.setAttribute("visibility", "hidden");
    };
    plot.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const part = (100 * (event.clientX - box.left)) / box.width;
      let best = 0;
      places.forEach((place, number) => {
        if (Math.abs(place - part) < Math.abs(places[best] - part)) best = number;
      });
      show(best);
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: at + 1, ArrowLeft: at < 0 ? places.length - 1 : at - 1, Home: 0, End: places.length - 1 };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(moves[event.key]);
    });
  }

  // -- samples
  const rows = JSON.parse(find("data").textContent);
  if (!rows.length) return;
  const STRANGE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
  const write = (element, text) => {
    let last = 0;
    for (const found of text.matchAll(STRANGE)) {
      element.append(text.slice(last, found.index));
      const code = found[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
      element.append(make("span", "strange", `⟨U+${code}⟩`));
      last = found.index + found[0].length;
    }
    element.append(text.slice(last));
    return element;
  };
  const count = (value) => (value < 0 || value === undefined ? "–" : value.toLocaleString("en"));
  const time = (seconds) => `${seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(0)} s`;
  const textOf = (message) => [message.reasoning, message.text, message.calls].filter(Boolean).join("\n");
  const asked = (row) => row.messages.filter((message) => message.role === "user").pop() || row.messages[0] || {};
  for (const row of rows) {
    row.messages = row.messages || [];
    row.thinks = row.thinking ? "thinking" : "not thinking";
    row.words = [row.key, row.batch, row.server, row.worker, row.error, row.source, ...row.messages.map(textOf),
      row.answer ? textOf(row.answer) : ""].join("\n").toLowerCase();
  }

  const list = find("list");
  const shown = find("row");
  const filters = { outcome: (row) => [row.outcome], why: (row) => row.why, source: (row) => [row.source || "no source"],
    thinking: (row) => [row.thinks] };
  for (const [name, values] of Object.entries(filters)) {
    const select = find(`by-${name}`);
    const known = [...new Set(rows.flatMap(values))].sort();
    for (const value of known) select.add(new Option(value, value));
    if (known.length < 2) select.parentElement.hidden = true;
    select.addEventListener("change", () => fill());
  }
  find("order").addEventListener("change", () => fill());
  let waiting = 0;
  find("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(fill, 120);
  });
  document.querySelector(".filters").addEventListener("submit", (event) => event.preventDefault());

  let current = null;
  let asTokens = false;
  const fill = () => {
    const wanted = find("search").value.trim().toLowerCase();
    const order = find("order").value;
    const some = rows.filter((row) => (!wanted || row.words.includes(wanted)) &&
      Object.entries(filters).every(([name, values]) => !find(`by-${name}`).value || values(row).includes(find(`by-${name}`).value)));
    if (order) some.sort((a, b) => (order === "start" ? (a.start || 0) - (b.start || 0) : (b[order] || 0) - (a[order] || 0)));
    list.replaceChildren(...some.map(entry));
    find("found").textContent = `${some.length} of ${rows.length} rows`;
    choose(some.includes(current) ? current : some[0] || null, false);
  };
  const entry = (row) => {
    const item = make("li");
    const choice = make("button");
    choice.type = "button";
    choice.dataset.key = row.key;
    choice.append(write(make("span", "first"), (asked(row).text || row.key).slice(0, 120).replace(/\s+/g, " ")));
    const more = make("span", "more");
    more.append(make("span", row.outcome, row.outcome), make("span", "", `${count(row.tokens)} tokens`), make("span", "", time(row.seconds || 0)));
    choice.append(more);
    choice.addEventListener("click", () => choose(row, true));
    item.append(choice);
    return item;
  };
  list.addEventListener("keydown", (event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1 };
    const buttons = [...list.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    if (!(event.key in moves) || at < 0) return;
    event.preventDefault();
    const next = buttons[Math.max(0, Math.min(buttons.length - 1, at + moves[event.key]))];
    next.focus();
    next.click();
  });

  const choose = (row, isAsked) => {
    current = row;
    for (const choice of list.querySelectorAll("button")) {
      choice.setAttribute("aria-current", String(row !== null && choice.dataset.key === row.key));
    }
    shown.replaceChildren(...(row === null ? [make("p", "empty", "No row is like that.")] : parts(row)));
    shown.scrollTop = 0;
    if (isAsked && window.matchMedia("(max-width: 46rem)").matches) shown.scrollIntoView();
  };
  const parts = (row) => {
    const found = [write(make("h3"), row.key)];
    const facts = make("dl", "facts");
    const fact = (name, value) => {
      if (value === undefined || value === "") return;
      const pair = make("div");
      pair.append(make("dt", "", name), write(make("dd"), String(value)));
      facts.append(pair);
    };
    fact("outcome", row.finish && row.finish !== row.outcome ? `${row.outcome}, ${row.finish}` : row.outcome);
    fact("here as", row.why.join(", "));
    fact("tokens", `${count(row.prompt)} + ${count(row.tokens)}`);
    fact("time", row.seconds ? `${time(row.seconds)}, ${(row.tokens / row.seconds).toFixed(0)} tokens/s` : "");
    fact("asked (UTC)", row.start ? new Date(row.start * 1000).toISOString().slice(0, 19).replace("T", " ") : "");
    fact("source", row.source);
    fact("split", row.split);
    fact("drawn", row.drawn && Object.entries(row.drawn).map(([name, value]) => `${name} ${value}`).join(", "));
    fact("server", row.server);
    fact("batch", row.batch + (row.attempt > 1 ? `, attempt ${row.attempt}` : ""));
    fact("ids", row.ids);
    fact("trained on", row.mask ? `no: ${row.mask}` : "the answer, not the prompt");
    found.push(facts);
    if (row.tok) {
      const tabs = make("div", "tabs");
      for (const [name, isTokens] of [["Text", false], ["Tokens", true]]) {
        const tab = make("button", "", name);
        tab.type = "button";
        tab.setAttribute("aria-pressed", String(asTokens === isTokens));
        tab.addEventListener("click", () => {
          asTokens = isTokens;
          choose(row, false);
          shown.querySelector(`.tabs button[aria-pressed="true"]`).focus();
        });
        tabs.append(tab);
      }
      found.push(tabs);
    }
    if (row.error) found.push(block("error", row.kind || "error", row.error));
    if (row.tok && asTokens) return [...found, ...tokens(row)];
    if (row.left) found.push(make("p", "note", `${row.left} earlier messages are not shown.`));
    found.push(...row.messages.map((one) => message(one)));
    if (row.answer) found.push(message(row.answer));
    return found;
  };
  const block = (kind, role, text) => {
    const element = make("div", "message");
    element.append(make("span", "role", role), write(make("div", `text ${kind}`), text));
    return element;
  };
  const message = (one) => {
    const element = make("div", "message");
    element.append(write(make("span", "role"), one.asked ? `${one.role}, the target's own` : one.role));
    if (one.reasoning) element.append(write(make("div", one.asked ? "text reasoning" : "text"), one.reasoning));
    if (one.text) element.append(write(make("div", one.asked ? "text answer" : "text"), one.text));
    if (one.calls) element.append(write(make("div", `text calls${one.asked ? " answer" : ""}`), one.calls));
    if (one.asked && !one.reasoning && !one.text && !one.calls) element.append(make("p", "note", "an empty answer"));
    return element;
  };
  const tokens = (row) => {
    const tok = row.tok;
    const said = tok.at ? "" : " As ids: no tokenizer was there.";
    const note = make("p", "note", `${count(tok.pn)} tokens of the prompt, ${count(tok.an)} of the answer. Underlined is what is trained on.${said}`);
    const box = make("div", "text tokens");
    const add = (ids, texts, kind, isTrained) => ids.forEach((id, number) => {
      const one = make("span", `token ${kind(number)}${isTrained ? " trained" : ""}`);
      one.title = `id ${id}`;
      const text = texts ? texts[number] : String(id);
      write(one, text.replace(/\n/g, "↵\n") || "·");
      if (number === tok.head && texts === tok.at && kind !== PROMPT) box.append(make("span", "gap", ` … ${count(tok.an - ids.length)} tokens are not shown … `));
      box.append(one, texts ? "" : " ");
    });
    if (tok.pn > tok.p.length) box.append(make("span", "gap", `… ${count(tok.pn - tok.p.length)} earlier tokens … `));
    add(tok.p, tok.pt, PROMPT, false);
    add(tok.a, tok.at, (number) => (number < (tok.think || 0) ? "reasoning" : "answer"), !row.mask);
    return [note, box];
  };
  const PROMPT = () => "prompt";
  find("browser").hidden = false;
  fill();
})();
