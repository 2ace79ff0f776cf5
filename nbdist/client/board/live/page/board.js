// The board in a page: what the kernel sends is drawn here, and what is clicked goes there.

import { figure, sizeOf, whole } from "./numbers.js";
import { Lines, gradientNorm, valueAt } from "./lines.js";
import { Plot } from "./plot.js";
import { expertStrips, make, plainBars, stepBars } from "./bars.js";
import { Timeline } from "./timeline.js";
import { shownOf } from "./outputs.js";
import { Notices } from "./notices.js";
import { STYLE } from "./style.js";

/** @typedef {import("./bars.js").Stack} Stack */
/**
 * @typedef {object} Frame What does not change; see words.py.
 * @property {number[]} ranks
 * @property {[string, number[]][]} styles
 * @property {[string, string, string, string][]} parts
 * @property {string[]} rows
 * @property {[string, string][]} views
 * @property {string} view
 * @property {string | null} text
 * @property {string | null} background
 * @property {Record<string, string>} titles
 * @property {string[]} bytes
 * @property {boolean} has_actions
 * @property {string | null} lost Why no points can be fetched for a zoom; null where they can.
 */

const ANSWER_S = 5; // after which a kernel that has not answered is said to be deaf
const GREET_MS = 500;
const REST_MS = 150; // of the pointer on a step, before its collectives are asked for
const SPEAK_S = 5; // a screen reader that gets text more often never falls silent
const ALL = -1;
const UNHEARD =
  "This front end's clicks are heard when the cell has ended. In a terminal: nbdist board, " +
  "nbdist stacks.";
const CUT_OFF =
  "The kernel was restarted or has ended while this cell ran; this is what was known then.";
const [SMALL_PX, LARGE_PX] = [170, 300];
const PARTS = [
  "progress", "verdicts", "tools", "remark", "ranks", "view", "step", "table", "answer",
  "texts", "status", "notices", "whole", "alarm",
];

class BoardPage {
  /** @param {any} model @param {HTMLElement} element */
  constructor(model, element) {
    this.model = model;
    /** @type {Frame} */
    this.frame = model.get("frame");
    this.lines = new Lines();
    this.words = model.get("words") ?? {};
    this.name = model.get("history")?.view ?? this.frame.view;
    this.id = String(Math.random());
    /** @type {[number, number] | null} */
    this.zoom = null;
    this.fetched = "";
    /** @type {number | null} */
    this.cursor = null;
    this.isLog = false;
    /** @type {Set<number>} */
    this.hidden = new Set();
    /** @type {Plot[]} */
    this.plots = [];
    this.plan = "";
    this.spokeAt = -Infinity;
    this.isDue = false;
    this.isHeard = false;
    this.timeline = new Timeline(this.frame.rows, "collectives of the last steps, ms");
    this.lineOfStep = new Timeline(this.frame.rows, "its collectives, ms");
    /** @type {{step: number, line: any} | null} The step whose collectives were asked for. */
    this.stepLine = null;
    this.root = make("div", "nbdist-board");
    /** @type {Record<string, HTMLElement>} */
    this.parts = Object.fromEntries(PARTS.map((name) => [name, make("div", `nb-${name}`)]));
    /** @type {HTMLButtonElement[]} */
    this.viewButtons = [];
    this.#build(element);
    this.notices = new Notices(this.parts.notices);
    this.parts.notices.hidden ||= !this.frame.has_actions;
    this.stopped = new AbortController();
    this.#restore();
    const hear = (/** @type {any} */ content, /** @type {DataView[]} */ buffers) => this.#hear(content, buffers);
    model.on("msg:custom", hear);
    // ipywidgets' word that the kernel has gone, or is back: then it is heard again.
    const cut = () => this.root.classList.add("nb-cut");
    model.on("comm_live_update", cut);
    const resized = new ResizeObserver(() => this.draw());
    resized.observe(this.root);
    this.stopped.signal.addEventListener("abort", () => {
      model.off("msg:custom", hear);
      model.off("comm_live_update", cut);
      resized.disconnect();
      clearTimeout(this.deaf);
      clearTimeout(this.resting);
    });
    if (this.frame.has_actions && !this.words.outcome) {
      this.#greet(performance.now());
    }
    this.show(this.name);
  }

  /** Asks until the kernel answers: JupyterLab makes its subshell after the first widget. */
  #greet(/** @type {number} */ since) {
    if (this.isHeard || this.words.outcome) return;
    this.#say({ kind: "hello" });
    if (performance.now() - since > ANSWER_S * 1000) this.#remark(UNHEARD);
    this.deaf = setTimeout(() => this.#greet(since), GREET_MS);
  }

  /** Draws what the kernel had when this page was opened. */
  #restore() {
    const state = this.model.get("history");
    if (state?.headers) this.lines.take(state.headers, this.model.get("points"));
    this.#sayNotFinite();
    this.#showTexts(state?.texts ?? [], state?.left ?? null);
  }

  /** @param {any} content @param {DataView[]} buffers */
  #hear(content, buffers) {
    this.root.classList.remove("nb-cut");
    if (content.page && content.page !== this.id) return; // another page has asked
    switch (content.kind) {
      case "points":
        if (!this.lines.take(content.headers, buffers[0] ?? null)) this.#say({ kind: "whole" });
        this.#sayNotFinite();
        this.#fetch(); // what was just thinned
        break;
      case "range": {
        const { low, high, lost, headers } = content;
        const lines = new Lines(true);
        lines.take(headers, buffers[0] ?? null);
        if (this.zoom) this.lines.show({ low, high, lost, lines });
        break;
      }
      case "step":
        this.stepLine = content;
        this.#showStep();
        break;
      case "words":
        this.words = content.words;
        if (!this.#isSelected) this.#update();
        break;
      case "texts":
        this.texts = content.texts;
        if (!this.#isSelected) this.#showTexts(this.texts, null);
        this.#tellThatItIsOpen(); // the cell's own outputs have given way to these
        break;
      case "taken":
        clearTimeout(this.deaf);
        break;
      case "left":
        this.#showTexts([], content.left);
        break;
      case "answer":
        this.#answer(content.title, content.text);
        break;
      case "heard":
        this.isHeard = true;
        clearTimeout(this.deaf);
        this.#remark("");
        break;
      case "remark":
        this.#remark(content.text);
        break;
      default:
        return;
    }
    this.draw();
  }

  /** @param {object} content */
  #say(content) {
    this.model.send({ ...content, page: this.id });
  }

  /** Whether text of the board is selected: it is not replaced then, so that it can be copied. */
  get #isSelected() {
    const chosen = document.getSelection();
    return Boolean(chosen && !chosen.isCollapsed && this.root.contains(chosen.anchorNode));
  }

  #sayNotFinite() {
    const bad = this.lines.notFinite;
    if (!bad) return;
    this.notices.lossIs(bad);
    const said = `The loss of rank ${bad[0]} is not finite since step ${whole(bad[1])}.`;
    if (this.parts.alarm.textContent !== said) this.parts.alarm.textContent = said;
  }

  // What plots share: see Sheet in plot.js.

  /** @param {number | null} step */
  point(step) {
    if (step === this.cursor) return;
    this.cursor = step;
    this.#showStep();
    this.draw();
  }

  /** @param {[number, number] | null} range */
  zoomTo(range) {
    this.zoom = range;
    if (!range) this.lines.show(null);
    this.#fetch();
    this.parts.whole.hidden = range === null;
    this.draw();
  }

  /** Asks once for the points of the zoom that lines have lost. */
  #fetch() {
    const wanted = this.zoom && this.lines.isThinned ? this.zoom.join() : "";
    if (wanted === this.fetched) return;
    this.fetched = wanted;
    if (!this.zoom || this.frame.lost !== null) return;
    this.#say({ kind: "range", low: this.zoom[0], high: this.zoom[1] });
  }

  /** Which steps are shown, and whether all of their points are. */
  #sayRange() {
    const { range } = this.parts;
    range.hidden = !this.zoom;
    if (!this.zoom) return;
    const [low, high] = this.zoom;
    const finer = this.lines.finer(this.zoom);
    const lost = finer ? finer.lost : this.frame.lost;
    const isThinned = this.plots.some((plot) => plot.isThinned);
    const more = lost || (finer ? "zoom in for the rest" : "");
    const thinned = isThinned || finer?.lost ? `: thinned, peaks kept${more && "; "}${more}` : "";
    const said = `steps ${whole(Math.ceil(low))} to ${whole(Math.floor(high))}${thinned}`;
    if (range.textContent !== said) range.textContent = said;
  }

  /** @param {number} rank */
  styleOf(rank) {
    if (rank === ALL) return { color: getComputedStyle(this.root).color, dashes: [], name: "all" };
    const [color, dashes] = this.frame.styles[this.frame.ranks.indexOf(rank)] ?? ["#888", []];
    return { color, dashes, name: `rank ${rank}` };
  }

  get marks() {
    return this.words.marks ?? [];
  }

  steps() {
    return this.lines.steps;
  }

  // The page's parts.

  /** @param {HTMLElement} element */
  #build(element) {
    const root = this.root;
    if (this.frame.background) {
      root.style.background = this.frame.background;
      root.style.color = this.frame.text ?? "";
    }
    const style = make("style", "", STYLE);
    this.parts.whole = this.#button("Whole run", "Zoom out (double-click, Escape)", () => this.zoomTo(null));
    this.parts.whole.hidden = true;
    this.parts.range = make("span", "nb-range");
    this.parts.notices = make("span", "nb-notices");
    this.parts.status.setAttribute("role", "status");
    this.parts.alarm.setAttribute("role", "alert");
    this.parts.remark.setAttribute("role", "status");
    this.parts.answer.hidden = true;
    this.#buildTools();
    this.#buildRanks();
    root.dataset.lmSuppressShortcuts = "true"; // Jupyter's keys are not for who is in the board
    const { progress, verdicts, tools, remark, ranks, view, step, table, answer, texts, status, alarm } = this.parts;
    const cutOff = make("div", "nb-cut-off", CUT_OFF);
    root.append(style, cutOff, progress, alarm, verdicts, tools, remark, ranks, view, step, table, answer, texts, status);
    element.append(root);
  }

  #buildTools() {
    const views = make("span", "nb-views");
    views.setAttribute("role", "radiogroup");
    views.setAttribute("aria-label", "View");
    for (const [name, help] of this.frame.views) {
      const button = this.#button(name, help, () => this.show(name, true));
      button.setAttribute("role", "radio");
      button.dataset.view = name;
      this.viewButtons.push(button);
      views.append(button);
    }
    views.addEventListener("keydown", (event) => this.#moveChoice(event));
    const log = this.#button("log", "Logarithmic scale", () => {
      this.isLog = !this.isLog;
      log.setAttribute("aria-pressed", String(this.isLog));
      this.draw();
    });
    log.setAttribute("aria-pressed", "false");
    this.parts.tools.append(views, log, this.parts.whole);
    if (this.frame.has_actions) this.parts.tools.append(...this.#actions());
    this.parts.tools.append(this.parts.notices, this.parts.range);
  }

  #actions() {
    const choice = /** @type {HTMLSelectElement} */ (make("select", "nb-of-running"));
    choice.setAttribute("aria-label", "Which ranks are interrupted");
    choice.append(new Option("all ranks", String(ALL)));
    for (const rank of this.frame.ranks) choice.append(new Option(`rank ${rank}`, String(rank)));
    const ask = (/** @type {string} */ what) => () => this.#ask({ what, rank: Number(choice.value) });
    const buttons = [
      this.#button("Stacks", "Show where each rank is now", ask("stacks")),
      this.#button("Cost", "Show what watching costs this training", ask("cost")),
      this.#button("Interrupt", "End this cell: an interrupt on all ranks, or on one", ask("interrupt")),
    ];
    const pause = this.pauseButton = this.#button("Pause", "All ranks stand still after the same step", ask("pause"));
    const go = this.#button("Continue", "Let paused ranks go on", ask("continue"));
    for (const button of [...buttons, pause, go]) button.classList.add("nb-of-running");
    return [...buttons, choice, pause, go, this.#box()];
  }

  /** Where an expression is typed that all ranks evaluate at one step, or a value that is set. */
  #box() {
    const box = /** @type {HTMLInputElement} */ (make("input", "nb-of-running"));
    box.placeholder = "peek: x.norm()   or   lr=0.01";
    box.title = "Enter: on all ranks after the same step, while they train";
    box.setAttribute("aria-label", "Peek at an expression, or change a value");
    box.addEventListener("keydown", (event) => {
      event.stopPropagation(); // Jupyter's own keys
      if (event.key !== "Enter" || !box.value.trim()) return;
      this.#ask({ what: "peek or change", text: box.value });
    });
    return box;
  }

  /** Asks the kernel for something; what it answered before goes. @param {{what: string, rank?: number, text?: string}} asked */
  #ask(asked) {
    const isOfStep = ["pause", "peek or change"].includes(asked.what);
    this.parts.answer.hidden = true;
    this.#remark(isOfStep ? "Waiting for the end of a step …" : "Asking the ranks …");
    this.#say({ kind: "ask", ...asked });
    clearTimeout(this.deaf);
    this.deaf = setTimeout(() => this.#remark(UNHEARD), ANSWER_S * 1000);
  }

  /** @param {string} words @param {string} help @param {() => void} act */
  #button(words, help, act) {
    const button = /** @type {HTMLButtonElement} */ (make("button", "", words));
    button.title = help;
    button.addEventListener("click", act);
    return button;
  }

  #buildRanks() {
    for (const rank of this.frame.ranks) {
      const { color, dashes, name } = this.styleOf(rank);
      const button = this.#button(name, "Hide or show its lines", () => {
        if (!this.hidden.delete(rank)) this.hidden.add(rank);
        button.setAttribute("aria-pressed", String(!this.hidden.has(rank)));
        this.draw();
      });
      button.setAttribute("aria-pressed", "true");
      button.prepend(sampleOf(color, dashes));
      this.parts.ranks.append(button);
    }
  }

  /** @param {KeyboardEvent} event */
  #moveChoice(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const names = this.frame.views.map(([name]) => name);
    this.show(names[(names.indexOf(this.name) + move + names.length) % names.length], true);
    this.viewButtons.find(({ dataset }) => dataset.view === this.name)?.focus();
    event.preventDefault();
  }

  /** Shows a view. @param {string} name @param {boolean} [isChosen] */
  show(name, isChosen = false) {
    this.name = name;
    for (const button of this.viewButtons) {
      const isShown = button.dataset.view === name;
      button.setAttribute("aria-checked", String(isShown));
      button.tabIndex = isShown ? 0 : -1;
    }
    if (isChosen) this.#say({ kind: "view", name });
    this.plan = "";
    this.spokeAt = -Infinity;
    this.#update();
    this.draw();
  }

  /** Shows the newest words. */
  #update() {
    const words = this.words;
    this.#showProgress();
    setHtml(this.parts.verdicts, this.name === "verdicts" || words.verdicts ? words.verdicts : "");
    this.root.classList.toggle("nb-runs", this.frame.has_actions && !words.outcome);
    this.pauseButton?.setAttribute("aria-pressed", String(Boolean(words.paused)));
    const table = this.name === "loss" ? this.#lossTable() : words.tables?.[this.name];
    const colors = this.name === "collectives" ? this.frame.rows : null;
    this.parts.table.replaceChildren(...(table ? [tableOf(table, colors)] : []));
    this.timeline.show(words.line ?? null, words.tables?.collectives?.[2] ?? [], this.sentence);
    this.notices.wordsAre(words);
    this.#showStep();
    const now = performance.now() / 1000;
    if (now - this.spokeAt < SPEAK_S) return;
    this.spokeAt = now;
    this.parts.status.textContent = this.sentence;
  }

  get sentence() {
    return this.words.sentences?.[this.name] ?? "";
  }

  #showProgress() {
    const { epoch, captions } = this.words;
    const progress = captions?.[this.name] ?? this.words.progress;
    const bar = document.createElement("progress");
    bar.hidden = !epoch;
    [bar.value, bar.max] = epoch ?? [0, 1];
    this.parts.progress.replaceChildren(bar, make("span", "", progress ?? ""));
  }

  /** The plots of the chosen view; made anew when there are others. */
  #arrange() {
    const subjects = this.#subjects();
    const plan = [this.name, ...subjects.map(({ title }) => title)].join("|");
    if (plan === this.plan) return;
    this.plan = plan;
    this.plots = subjects.map((subject, place) => {
      const isLarge = this.name === "loss" && place === 0;
      const plot = new Plot(this, subject, isLarge ? LARGE_PX : SMALL_PX);
      plot.element.classList.toggle("nb-wide", isLarge);
      return plot;
    });
    const more = this.name === "collectives" ? [this.timeline.element] : [];
    this.parts.view.replaceChildren(...this.plots.map((plot) => plot.element), ...more);
    this.parts.ranks.hidden = !this.plots.length || this.frame.ranks.length < 2;
  }

  /** @returns {import("./plot.js").Subject[]} */
  #subjects() {
    const over = (
      /** @type {string} */ title, /** @type {string} */ unit, /** @type {number | null} */ floor,
      /** @type {string} */ name,
    ) => ({
      title, unit, floor, isOverSteps: true,
      lines: () => this.lines.of(name, this.zoom ?? undefined),
    });
    const has = (/** @type {string} */ name) => this.lines.named.has(name);
    const own = [...this.lines.named.keys()].filter((name) => name.startsWith("own.")).sort()
      .map((name) => over(name.slice(4), "", null, name));
    const loss = over("loss", "", null, this.lines.lossName);
    const ofMean = this.frame.ranks.length > 1
      ? { mean: () => this.lines.mean(this.lines.lossName, this.zoom ?? undefined) } : {};
    const comm = has("comm") ? "comm" : "part.communication";
    const step = over("step time", "ms", 0, "step");
    const ofComm = has(comm) ? [over("communication", "ms", 0, comm)] : [];
    switch (this.name) {
      case "overview":
        return [...(has(this.lines.lossName) ? [loss] : []), ...ofComm,
          ...(ofComm.length || !has("step") ? [] : [step]), ...own.slice(0, 2)];
      case "loss": {
        /** @param {string} name */
        const near = (name) => this.lines.of(name, this.zoom ?? undefined);
        const norm = () => has("grad_norm")
          ? near("grad_norm") : new Map([[ALL, gradientNorm(near("grad_share"))]]);
        const ofNorm = { ...over("gradient norm, of all ranks", "", null, ""), lines: norm };
        const hasNorm = has("grad_norm") || has("grad_share");
        return [...(has(this.lines.lossName) ? [{ ...loss, ...ofMean }] : []), ...(hasNorm ? [ofNorm] : []), ...own];
      }
      case "step":
        return has("step") ? [step] : [];
      case "ranks":
        return [...(has("step") ? [step] : []),
          ...(has("experts") ? [over("tokens for the rank's experts", "", 0, "experts")] : []),
          ...this.#devices()];
      default:
        return [];
    }
  }

  #devices() {
    return Object.entries(this.frame.titles).filter(([name]) => this.lines.named.has(name))
      .map(([name, title]) => ({
        title, unit: "", floor: 0, isOverSteps: false,
        lines: () => this.lines.of(name),
        write: this.frame.bytes.includes(name) ? sizeOf : figure,
      }));
  }

  /** The bars beside the plots: of the step that is pointed at, or of the recent ones. */
  #showStep() {
    const { step } = this.parts;
    if (this.name === "verdicts") {
      step.replaceChildren(...this.#verdictBars());
      return;
    }
    if (this.name === "ranks" && this.words.experts) {
      step.replaceChildren(expertStrips(this.words.experts, this.frame.rows[0]));
      return;
    }
    if (!["overview", "loss", "step"].includes(this.name)) {
      step.replaceChildren();
      return;
    }
    // What is below stays where it is while the pointer moves.
    step.style.minHeight = this.cursor === null ? "" : `${step.offsetHeight}px`;
    if (this.cursor !== null) {
      step.replaceChildren(...this.#atStep(this.cursor));
      return;
    }
    const stack = this.name === "loss" ? null : this.words.stack;
    const head = make("div", "nb-head", "time of a step, mean of the last 50");
    step.replaceChildren(...(stack ? [head, stepBars(stack, this.partsOfSteps)] : []));
  }

  get partsOfSteps() {
    return this.frame.parts.map(([name, color, hatch, label]) => ({ name, color, hatch, label }));
  }

  /** What was measured of one step, in words and as bars. @param {number} step */
  #atStep(step) {
    const lines = this.lines.ofParts(this.zoom ?? undefined);
    const measured = lines.measuredNear(step);
    const stack = measured === null ? null : stackAt(lines, this.frame.ranks, measured);
    if (measured === null || !stack) {
      return [make("div", "nb-head", `What step ${whole(step)} was made of was not measured.`)];
    }
    const said = [`At step ${whole(measured)}`];
    if (measured !== step) said.unshift(`Step ${whole(step)} was not measured. `);
    const waits = Object.entries(stack.waits).toSorted(([, a], [, b]) => b[1] - a[1])[0];
    if (waits) {
      said.push(` rank ${waits[0]} waited ${timeOf(waits[1][1])} for rank ${waits[1][0]}`);
    } else {
      said.push(this.lines.named.has("part.waiting") && stack.parts.waiting
        ? " no rank waited for another" : ", who waited for whom was not compared");
    }
    const head = make("div", "nb-head", `${said.join("")}.`);
    return [head, stepBars(stack, this.partsOfSteps), ...this.#collectivesOf(measured)];
  }

  /** The collectives of one step; asked for when the pointer rests on it. @param {number} step */
  #collectivesOf(step) {
    if (this.stepLine?.step === step) {
      if (!this.stepLine.line) return [make("div", "", "Its collectives are not kept.")];
      const rows = this.words.tables?.collectives?.[2] ?? [];
      this.lineOfStep.show(this.stepLine.line, rows, `collectives of step ${whole(step)}`);
      return [this.lineOfStep.element];
    }
    clearTimeout(this.resting);
    if (!this.frame.has_actions) return [];
    this.resting = setTimeout(() => this.#say({ kind: "step", step }), REST_MS);
    return [];
  }

  #verdictBars() {
    const { no_verdict: none, verdicts } = this.words;
    /** @type {[number, number, string][]} Rank, value, what is said of it. */
    const own = this.words.own ?? [];
    /** @type {[number, number, number][]} Source, target, bytes per second. */
    const links = this.words.links ?? [];
    const colorOf = (/** @type {string} */ name) => this.frame.parts.find(([part]) => part === name)?.[1] ?? "#888";
    /** @type {[string, string]} */
    const colors = [colorOf("compute"), colorOf("waiting")];
    const found = verdicts ? [] : [make("div", "nb-head", none ?? "")];
    if (own.length) {
      const rows = own.map(([rank, value, said]) =>
        ({ name: `rank ${rank}`, value, isBlamed: Boolean(said), help: said }));
      found.push(plainBars("time per step without communication, mean, ms", rows, figure, colors));
    }
    if (links.length) {
      const middle = links.map(([, , rate]) => rate).toSorted((a, b) => a - b)[links.length >> 1];
      const rows = links.map(([source, target, rate]) => ({
        name: `${source} → ${target}`, value: rate, isBlamed: rate < middle / 2, help: "",
      }));
      found.push(plainBars("links, bytes per second while busy", rows, (rate) => `${sizeOf(rate)}/s`, colors));
    }
    return found;
  }

  /** The loss by rank, as the lines have it. */
  #lossTable() {
    const rows = [...this.lines.of(this.lines.lossName)].flatMap(([rank, line]) => {
      if (!line.n) return [];
      const known = [...line.y.subarray(0, line.n)].filter(Number.isFinite);
      const recent = known.slice(-50);
      const mean = recent.reduce((sum, value) => sum + value, 0) / recent.length;
      const last = line.y[line.n - 1];
      const least = known.reduce((a, b) => Math.min(a, b), Infinity);
      return [[String(rank), whole(line.x[line.n - 1]), figure(last),
        recent.length ? figure(mean) : "–", known.length ? figure(least) : "–",
        whole(line.n - known.length)]];
    });
    if (!rows.length) return null;
    return ["Loss by rank", ["rank", "step", "loss", "mean of last 50", "lowest", "not finite"], rows,
      [true, true, true, true, true, true]];
  }

  /** @param {any[]} texts @param {any[] | null} left All that the cell has left. */
  #showTexts(texts, left) {
    this.root.classList.toggle("nb-left", left !== null);
    this.parts.texts.replaceChildren(...(left ?? texts).map(shownOf));
  }

  /** @param {string} title @param {string} said */
  #answer(title, said) {
    clearTimeout(this.deaf);
    this.#remark("");
    const head = make("div", "nb-head", title);
    const close = this.#button("Close", "Hide this", () => (this.parts.answer.hidden = true));
    this.parts.answer.replaceChildren(head, make("pre", "", said), close);
    this.parts.answer.hidden = false;
  }

  /** @param {string} said */
  #remark(said) {
    this.parts.remark.textContent = said;
  }

  /** Draws once before the page's next frame, however often it is asked. */
  draw() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.#arrange();
      for (const plot of this.plots) plot.draw();
      this.#sayRange();
      if (this.name === "collectives") this.timeline.draw();
      if (this.lineOfStep.element.isConnected) this.lineOfStep.draw();
    });
  }

  /** Has JupyterLab save the notebook: see labextension/. Once, when the page shows the board. */
  #tellThatItIsOpen() {
    if (this.isTold || !this.root.isConnected || !this.frame.has_actions || this.words.outcome) return;
    this.isTold = true;
    this.root.dispatchEvent(new CustomEvent("nbdist-board-opened", { bubbles: true }));
  }

  close() {
    this.stopped.abort();
    if (!this.frame.has_actions || this.root.classList.contains("nb-cut")) return;
    this.#say({ kind: "goodbye" });
  }
}

/**
 * What was measured of one step on each rank; null where nothing was.
 * @param {Lines} lines
 * @param {number[]} ranks
 * @param {number} step
 * @returns {Stack | null}
 */
function stackAt(lines, ranks, step) {
  const names = [...lines.named.keys()].filter((name) => name.startsWith("part."));
  const at = (/** @type {string} */ name, /** @type {number} */ rank) => valueAt(lines.named.get(name)?.get(rank), step);
  const told = ranks.filter((rank) => names.some((name) => at(name, rank) !== null));
  if (!told.length) return null;
  /** @type {Record<string, number[]>} */
  const parts = {};
  const put = (/** @type {string} */ name, /** @type {number} */ place, /** @type {number} */ value) => {
    (parts[name] ??= told.map(() => 0))[place] = value;
  };
  told.forEach((rank, place) => {
    const isCompared = at("part.waiting", rank) !== null;
    let sum = 0;
    for (const name of names) {
      const part = name.slice(5);
      if (isCompared ? part === "communication" : ["waiting", "transfer"].includes(part)) continue;
      const value = at(name, rank) ?? 0;
      sum += value;
      put(part, place, value);
    }
    if (!names.includes("part.other")) put("other", place, Math.max(0, (at("step", rank) ?? sum) - sum));
  });
  const last = at("last", ALL);
  /** @type {Record<string, [number, number]>} */
  const waits = {};
  told.forEach((rank, place) => {
    const waited = parts.waiting?.[place] ?? 0;
    const whole_ = Object.values(parts).reduce((sum, of) => sum + of[place], 0);
    if (last !== null && last !== rank && waited > 0.05 * whole_) waits[rank] = [last, waited];
  });
  return { ranks: told, parts, waits };
}

/** @param {number} ms */
function timeOf(ms) {
  if (ms >= 1000) return `${figure(ms / 1000)} s`;
  return ms < 0.1 ? `${figure(1000 * ms)} µs` : `${figure(ms)} ms`;
}

/**
 * @param {[string, string[], string[][], boolean[]]} table Caption, head, rows, numbers' columns.
 * @param {string[] | null} colors Of the rows, in turns.
 */
function tableOf([caption, head, rows, isRight], colors) {
  const table = make("table", "");
  table.append(make("caption", "", caption));
  const line = (/** @type {string[]} */ cells, /** @type {boolean} */ isHead, color = "") => {
    const row = make("tr", "");
    if (color) row.style.boxShadow = `inset 6px 0 ${color}`;
    cells.forEach((cell, place) => {
      const isName = isHead || place === 0;
      const element = make(isName ? "th" : "td", isRight[place] ? "nb-right" : "", cell);
      if (isName) element.setAttribute("scope", isHead ? "col" : "row");
      row.append(element);
    });
    return row;
  };
  const [top, body] = [make("thead", ""), make("tbody", "")];
  top.append(line(head, true));
  body.append(...rows.map((row, place) => line(row, false, colors?.[place % colors.length])));
  table.append(top, body);
  return table;
}

/** Sets HTML that the kernel has written, when it is other. @param {HTMLElement} element @param {string} html */
function setHtml(element, html) {
  if (element.dataset.html === html) return;
  element.dataset.html = html ?? "";
  element.innerHTML = html ?? "";
}

/** @param {string} color @param {number[]} dashes */
function sampleOf(color, dashes) {
  const sample = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  sample.setAttribute("width", "22");
  sample.setAttribute("height", "8");
  const stroke = dashes.map((length) => 2 * length).join(" ");
  sample.innerHTML =
    `<line x1="0" x2="22" y1="4" y2="4" stroke="${color}" stroke-width="2" stroke-dasharray="${stroke}"/>`;
  return sample;
}

/**
 * Has JupyterLab put outputs into the notebook's cell that another page has sent, see labextension/.
 * @param {any} model @param {any} place What live.py's `_place` returns.
 */
function take(model, place) {
  if (!place) return;
  const taken = () => model.send({ kind: "taken in" });
  document.dispatchEvent(new CustomEvent("nbdist-board-place", { detail: { ...place, taken } }));
}

export default {
  /** @param {{model: any}} page */
  initialize({ model }) {
    const page = String(Math.random());
    take(model, model.get("history")?.place);
    model.on("msg:custom", (/** @type {any} */ content) => {
      if (content.kind === "left") model.send({ kind: "takes", page });
      if (content.kind === "place" && content.page === page) take(model, content.place);
    });
  },
  /** @param {{model: any, el: HTMLElement}} page */
  render({ model, el }) {
    const page = new BoardPage(model, el);
    Object.assign(el, { nbdist: page }); // for tests, which ask what is drawn
    return () => page.close();
  },
};
