"use strict";
// Moves of sliders, the history, searches and copies. The server renders everything; this file replaces parts of the page.
const $ = (id) => document.getElementById(id);
let request = null;
let queue = Promise.resolve();
let search = null;
let turn = 0; // counts starts and cancels of searches: an answer to an earlier one is not shown
let retry = 0;

const own = (body) => ({ method: "POST", headers: { "X-Shardwright": "1" }, body });
const current = () => $("answers").dataset.query;

async function ask(address, options = {}) {
  try {
    const answer = await fetch(address, options);
    $("gone").hidden = true;
    return answer;
  } catch (error) {
    if (error.name !== "AbortError") $("gone").hidden = false;
    throw error;
  }
}

// Show the state of a query string. While a slider is dragged (`live`), the form stays as it is.
async function show(query, { push = false, live = false, pushed = "" } = {}) {
  if (request) request.abort();
  clearTimeout(retry);
  const mine = new AbortController();
  request = live ? mine : null; // only a drag is overtaken by the next request
  let answer, text;
  try {
    answer = await ask("/answers?" + query, { signal: mine.signal });
    text = await answer.text();
  } catch (error) {
    if (error.name !== "AbortError") retry = setTimeout(() => show(query, { push, live }), 2000);
    return;
  }
  const parts = new DOMParser().parseFromString(text, "text/html");
  const form = parts.getElementById("choices");
  const answers = parts.getElementById("answers");
  const refused = !form || !answers; // too long, another host, an error of the server, or too many requests
  $("refused").hidden = !refused;
  $("refused").textContent = refused ? text.trim() || answer.statusText : "";
  if (refused) return;
  const open = [...document.querySelectorAll("details[open]")].map((each) => each.id);
  const active = document.activeElement;
  const focused = active && active.id;
  // Text that is being typed is not replaced; the form is, after the next change.
  if (active.matches("input[data-move]") && active.value !== active.defaultValue) live = !push || active.name !== pushed;
  const scrolled = $("choices").scrollTop;
  if (!live) $("choices").replaceWith(document.adoptNode(form));
  $("answers").replaceWith(document.adoptNode(answers));
  for (const id of open) if (id && $(id)) $(id).open = true;
  if (!live) {
    prepare();
    $("choices").scrollTop = scrolled;
    if (focused && $(focused)) $(focused).focus({ preventScroll: true });
  }
  if (push) history.pushState(null, "", "/?" + current());
}

const moved = (key, value, base) =>
  base + "&" + new URLSearchParams({ move: key, to: value }).toString();

// Moves are made one after the other, each from the state that the one before it has led to.
function move(key, value) {
  queue = queue.then(() => show(moved(key, value, current()), { push: true, pushed: key }));
}

// Put a slider in front of each list of ordered numbers; the list remains the value of the form.
function prepare() {
  for (const list of document.querySelectorAll("select[data-number]")) {
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0, max: list.options.length - 1, step: 1, id: list.id + "-s" });
    slider.value = list.selectedIndex;
    slider.setAttribute("aria-describedby", list.getAttribute("aria-describedby"));
    const label = document.querySelector(`label[for="${list.id}"]`);
    const shown = document.createElement("output");
    label.htmlFor = slider.id;
    label.append(" ", shown);
    const say = () => {
      list.selectedIndex = slider.valueAsNumber;
      shown.textContent = list.value;
      slider.setAttribute("aria-valuetext", list.value);
    };
    say();
    const base = current();
    slider.addEventListener("input", () => {
      say();
      show(moved(list.name, list.value, base), { live: true });
    });
    slider.addEventListener("change", () => {
      const value = list.value;
      queue = queue.then(() => show(moved(list.name, value, base), { push: true }));
    });
    list.hidden = true;
    list.before(slider);
  }
}

function stopSearch(text) {
  search = null;
  $("cancel").hidden = $("progress").hidden = true;
  $("find").disabled = false;
  $("found").textContent = text;
}

async function cancel() {
  const id = search;
  turn += 1;
  if (!$("cancel") || $("cancel").hidden) return;
  stopSearch("cancelled");
  if (id) await end(id); // otherwise find() ends the search when it has its id
}

const end = (id) => fetch("/cancel/" + id, { ...own(""), keepalive: true }).catch(() => {});

async function find() {
  const kind = $("find").dataset.search;
  await cancel();
  const mine = turn;
  $("result").replaceChildren();
  $("find").disabled = true;
  $("cancel").hidden = $("progress").hidden = false;
  $("progress").removeAttribute("value");
  $("found").textContent = "searching";
  try {
    const started = await ask("/search/" + kind, own(current()));
    const reply = await started.text();
    const id = started.ok ? JSON.parse(reply).id : null;
    if (mine !== turn) return void (id && end(id));
    if (!id) return stopSearch(reply);
    search = id;
    while (mine === turn) {
      await new Promise((done) => setTimeout(done, 300));
      if (mine !== turn) return;
      const answer = await ask("/search/" + id);
      const state = answer.ok ? await answer.json() : null;
      if (mine !== turn) return;
      if (!state) return stopSearch("the search has ended; start it again");
      if (state.of) {
        $("progress").max = state.of;
        $("progress").value = state.done;
        $("found").textContent = `${state.done} of ${state.of} parts`;
      }
      if (state.problems.length) return stopSearch(state.problems.join("; "));
      if (state.result !== null) {
        const parts = new DOMParser().parseFromString(state.result, "text/html");
        $("result").replaceChildren(...[...parts.body.childNodes].map((each) => document.adoptNode(each)));
        return stopSearch("done");
      }
    }
  } catch {
    if (mine === turn) stopSearch("the server does not answer");
  }
}

async function readConfig() {
  const answer = await ask("/config", own($("config").value)).catch(() => null);
  if (!answer) return;
  if (!answer.ok) return void ($("unread").textContent = await answer.text());
  move("model", (await answer.json()).model);
}

document.addEventListener("change", (event) => {
  const field = event.target;
  if (field.matches("[data-move]")) move(field.name, field.value);
});
document.addEventListener("submit", (event) => {
  if (event.target.getAttribute("action") !== "/") return;
  event.preventDefault();
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-state]");
  const plain = !(event.ctrlKey || event.metaKey || event.shiftKey || event.altKey);
  if (link && plain && location.pathname === "/") {
    event.preventDefault();
    show(new URL(link.href).search.slice(1), { push: true }).then(() => $("page").scrollIntoView());
  }
  const button = event.target.closest("button");
  if (!button) return;
  if (button.id === "find") find();
  if (button.id === "cancel") cancel();
  if (button.id === "read") readConfig();
  if (button.dataset.copy) {
    navigator.clipboard.writeText($(button.dataset.copy).textContent).then(() => (button.textContent = "Copied"));
  }
});
addEventListener("popstate", () => location.pathname === "/" && show(location.search.slice(1)));
addEventListener("pagehide", cancel);

document.documentElement.classList.add("js");
// Browsers give no clipboard to a page from another machine over http.
document.documentElement.classList.toggle("no-copy", !navigator.clipboard);
if ($("find")) $("find").hidden = false;
if ($("answers")) prepare();
if ($("answers") && "start" in $("answers").dataset) find();
