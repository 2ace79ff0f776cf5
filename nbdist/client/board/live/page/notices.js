// Notices of the browser: the loss is not finite, the ranks stand still, the run has ended.

import { make } from "./bars.js";
import { whole } from "./numbers.js";

const KEY = "nbdist-notices"; // in the browser's storage: asked once, for all boards

export class Notices {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.said = new Set();
    this.id = String(Math.random()); // one board's notices replace no other's
    this.hasRun = false;
    this.button = make("button", "", "Notify me");
    this.button.title =
      "A notice of the browser when the loss is not finite, when the ranks stand still, and at the end";
    this.button.addEventListener("click", () => this.#choose());
    place.append(this.button);
    place.hidden = !("Notification" in window);
    this.#label();
  }

  get isOn() {
    return window.Notification?.permission === "granted" && localStorage.getItem(KEY) === "on";
  }

  async #choose() {
    if (this.isOn) {
      localStorage.setItem(KEY, "off");
    } else {
      await Notification.requestPermission();
      localStorage.setItem(KEY, "on");
    }
    this.#label();
  }

  #label() {
    const isBlocked = window.Notification?.permission === "denied";
    this.button.textContent = isBlocked ? "Notices blocked" : "Notify me";
    this.button.setAttribute("aria-pressed", String(this.isOn));
  }

  /** @param {[number, number] | null} bad Rank and step. */
  lossIs(bad) {
    if (bad) this.#tell("loss", `The loss of rank ${bad[0]} is not finite since step ${whole(bad[1])}.`);
  }

  /** @param {{outcome?: string | null, stands_still?: boolean, progress?: string}} words */
  wordsAre(words) {
    this.hasRun ||= words.outcome === null;
    if (words.stands_still) this.#tell("still", `The ranks stand still: ${words.progress}`);
    else this.said.delete("still");
    if (words.outcome && this.hasRun) this.#tell("end", `The training has ${endOf(words.outcome)}.`);
  }

  /** Says each thing once. @param {string} what @param {string} said */
  #tell(what, said) {
    if (this.said.has(what)) return;
    this.said.add(what);
    if (this.isOn) new Notification("nbdist", { body: said, tag: `${this.id}-${what}` });
  }
}

/** @param {string} outcome */
function endOf(outcome) {
  return { failed: "failed", interrupted: "been interrupted" }[outcome] ?? "finished";
}
