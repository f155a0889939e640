// Colours: text >= 4.5 on every ground, marks >= 3, versions told apart with any colour vision.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

const css = readFileSync(new URL("../../static/css/tokens.css", import.meta.url), "utf8");
const THEMES = ["light", "dark"];
const tokens = Object.fromEntries(THEMES.map((theme, index) => [theme,
  Object.fromEntries([...css.matchAll(/--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)/g)].map((found) => [found[1], found[index + 2]]))]));

const linear = (hex) => [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16) / 255).map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
const luminance = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;

function contrast(one, other) {
  const [low, high] = [luminance(linear(one)), luminance(linear(other))].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

// Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
const VISION = {
  normal: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  protan: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deutan: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritan: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
};

function oklab(rgb) {
  const [r, g, b] = rgb.map((value) => Math.min(1, Math.max(0, value)));
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s, 1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s, 0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s];
}

const seen = (hex, matrix) => oklab(matrix.map((row) => row.reduce((sum, weight, at) => sum + weight * linear(hex)[at], 0)));
const distance = (a, b) => Math.hypot(...a.map((value, at) => value - b[at]));

for (const theme of THEMES) {
  const colour = tokens[theme];
  test(`${theme}: text can be read on every ground`, () => {
    for (const text of ["text", "text-2", "text-3", "accent", "ok", "warn", "bad", "info"]) {
      for (const ground of ["ground", "surface", "sunken", "hover", "selected"]) {
        assert.ok(contrast(colour[text], colour[ground]) >= 4.5, `${text} on ${ground}`);
      }
    }
    for (const meaning of ["ok", "warn", "bad", "info"]) assert.ok(contrast(colour[meaning], colour[`${meaning}-soft`]) >= 4.5, meaning);
    assert.ok(contrast(colour["on-accent"], colour.accent) >= 4.5);
    for (let bin = 1; bin <= 8; bin += 1) assert.ok(contrast(colour["seq-text"], colour[`seq-${bin}`]) >= 4.5, `seq-${bin}`);
  });

  test(`${theme}: marks stand out from the surface`, () => {
    const marks = ["ok-mark", "warn-mark", "bad-mark", "info-mark", "chart-1", "chart-2", "chart-3", "chart-4", ...Array.from({ length: 8 }, (_, at) => `v${at}`)];
    for (const mark of marks) assert.ok(contrast(colour[mark], colour.surface) >= 3, mark);
  });

  test(`${theme}: both ends of a heat map stand out, and differ for every kind of colour vision`, () => {
    for (const end of ["heat-above", "heat-below"]) assert.ok(contrast(colour[end], colour["heat-ground"]) >= 3, end);
    for (const [vision, matrix] of Object.entries(VISION)) assert.ok(distance(seen(colour["heat-above"], matrix), seen(colour["heat-below"], matrix)) >= 0.1, vision);
  });

  test(`${theme}: versions differ for every kind of colour vision`, () => {
    for (const [vision, matrix] of Object.entries(VISION)) {
      for (let one = 0; one < 8; one += 1) {
        for (let other = one + 1; other < 8; other += 1) {
          const apart = distance(seen(colour[`v${one}`], matrix), seen(colour[`v${other}`], matrix));
          assert.ok(apart >= 0.08, `v${one} and v${other}, ${vision}: ${apart.toFixed(3)}`);
        }
      }
    }
  });
}
